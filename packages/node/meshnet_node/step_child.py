"""The process that compiles layers: ``python -m meshnet_node.step_child SKETCHES TOLD``, started by a node alone.

Ends when the node does. Writes each layer's library and what belongs to it under their own names once they are whole;
a reason why a layer cannot be compiled goes into the file TOLD.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from contextlib import suppress
from pathlib import Path

import torch

from meshnet_core.errors import UnsupportedModelError
from meshnet_node import step_export
from meshnet_node.atomic_file import renamed_when_done
from meshnet_node.layer_sketch import LayerSketch
from meshnet_node.step_compiler import JOB_PREFIX, about_text

NICENESS = 10  # a tenth of a frame's share of a core; at 19 it would not come to an end on a machine that is busy


def main(asked: Path, told: Path) -> int:
    """Compile what is asked for; the exit code."""
    threading.Thread(target=_end_with_parent, args=(asked.parent,), daemon=True).start()
    with suppress(OSError, AttributeError):
        os.nice(NICENESS)
    torch.set_num_threads(1)
    # From the node's own folder of temporary files, written a moment ago for this process.
    sketches: list[tuple[LayerSketch, str]] = torch.load(asked, weights_only=False)
    try:
        for sketch, package in sketches:
            _compile(sketch, Path(package), asked.parent)
    except UnsupportedModelError as error:
        told.write_text(error.message, "utf-8")
        return 1
    return 0


def _compile(sketch: LayerSketch, package: Path, work: Path) -> None:
    made = work / package.name
    traced = step_export.compile_layer(sketch, made)
    with renamed_when_done(package.with_suffix(".json")) as about:
        about.write_text(about_text(traced), "utf-8")
    with renamed_when_done(package) as target:
        target.write_bytes(made.read_bytes())
    made.unlink()


def _end_with_parent(work: Path, lifeline: int = 0) -> None:
    while os.read(lifeline, 1):  # not through sys.stdin, whose lock Python wants at its end
        pass
    if work.name.startswith(JOB_PREFIX):  # nobody else is left to remove it
        shutil.rmtree(work, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
