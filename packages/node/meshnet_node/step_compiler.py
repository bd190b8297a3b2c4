"""Compiled layers on disk, and the process that makes them: beside the node, so that its frames do not wait.

torch's compiler is Python and holds the interpreter for seconds; in the node's own process every product of every
frame would wait for it. A child at a low priority compiles instead, one thread, from a sketch that holds no
weight; what it writes is a library that the node loads in milliseconds. Kept in the cache folder, under a name that
says for what kind of layer, which torch and which processor it was made.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers

from meshnet_core.errors import HopFailedError, UnsupportedModelError
from meshnet_node.cache_folder import default_cache_dir, writing_to_cache
from meshnet_node.compiled_step import CompiledLayer, load_compiled
from meshnet_node.cpu_threads import leave_core
from meshnet_node.layer_sketch import LayerSketch
from meshnet_node.processor_name import processor_name
from meshnet_node.step_export import TracedLayer
from meshnet_node.step_frames import StoppedError

Compile = Callable[[Sequence[LayerSketch], Callable[[], bool]], list[CompiledLayer]]
"""From sketches to compiled layers; raises as :func:`compile_in_child` does. Asks often whether to stop."""

FORMAT = 1  # of what is kept: raise it when layers are compiled in another way
JOB_PREFIX = "meshnet-compile-"  # of the folder that a child works in
_POLL_S = 0.1
_one_at_a_time = threading.Lock()  # several shards of a node warm up one after the other


def folder() -> Path:
    """Where compiled layers are kept."""
    return default_cache_dir() / "compiled"


def compile_in_child(sketches: Sequence[LayerSketch], stopped: Callable[[], bool]) -> list[CompiledLayer]:
    """Compiled layers for ``sketches``, from the cache folder or made by a child; blocks for that long.

    Args:
        sketches: each of another kind.
        stopped: asked several times a second; ends the child.

    Raises:
        UnsupportedModelError: a layer of this family cannot be compiled, with the reason.
        HopFailedError: the child failed otherwise.
        InvalidInputError: the cache folder cannot be written to.
        StoppedError: ``stopped`` said so.
    """
    files = [_files(sketch) for sketch in sketches]
    missing = [
        (sketch, package)
        for sketch, (package, about) in zip(sketches, files, strict=True)
        if not (package.is_file() and about.is_file())
    ]
    if missing:
        while not _one_at_a_time.acquire(timeout=_POLL_S):
            if stopped():
                raise StoppedError
        try:
            _run_child(missing, stopped)
        finally:
            _one_at_a_time.release()
    return [load_compiled(sketch, *pair) for sketch, pair in zip(sketches, files, strict=True)]


def _files(sketch: LayerSketch) -> tuple[Path, Path]:
    made_by = (FORMAT, torch.__version__, transformers.__version__, sys.version_info[:2], _processor(sketch.device))
    name = hashlib.sha256(repr((sketch.kind, made_by)).encode()).hexdigest()[:32]
    return folder() / f"{name}.pt2", folder() / f"{name}.json"


def _processor(device: torch.device) -> str:
    """What code is made for: it may not run on another one that mounts the same folder."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    return processor_name()


def _run_child(missing: Sequence[tuple[LayerSketch, Path]], stopped: Callable[[], bool]) -> None:
    with writing_to_cache():
        folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        job = tempfile.mkdtemp(prefix=JOB_PREFIX)
    try:
        asked, told = Path(job) / "sketches", Path(job) / "told"
        torch.save([(sketch, str(package)) for sketch, package in missing], asked)
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(Path(job) / "work"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        environment.pop("GOMP_CPU_AFFINITY", None)
        leave_core()  # this thread only waits from here on
        said = Path(job) / "said"
        with (
            said.open("wb") as errors,
            subprocess.Popen(  # noqa: S603 - this Python and a module of ours
                # -P: a file called torch.py where the node happens to be started is not the torch that is meant
                [sys.executable, "-P", "-m", "meshnet_node.step_child", str(asked), str(told)],
                stdin=subprocess.PIPE,  # its lifeline: it ends when this process does
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environment,
                start_new_session=True,  # so that it ends together with the compilers that it starts
            ) as child,
        ):
            _wait(child, stopped)
        if told.is_file():
            raise UnsupportedModelError(told.read_text("utf-8"))
        if child.returncode:
            lines = said.read_text("utf-8", errors="replace").strip().splitlines()
            errors_said = [line for line in lines if "Error" in line] or [f"it ended with code {child.returncode}"]
            raise HopFailedError(f"compiling failed: {errors_said[-1]}")
    finally:
        shutil.rmtree(job, ignore_errors=True)


def _wait(child: subprocess.Popen[bytes], stopped: Callable[[], bool]) -> None:
    while True:
        try:
            child.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            if stopped():
                os.killpg(child.pid, signal.SIGKILL)
                raise StoppedError from None
        else:
            return


def about_text(traced: TracedLayer) -> str:
    """What is kept beside a library."""
    return json.dumps({"attention": traced.attention, "beside": traced.beside})
