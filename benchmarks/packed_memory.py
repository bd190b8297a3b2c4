"""Memory of nodes that hold a half of a GGUF's packed blocks each, by the bytes of those blocks.

    python -m benchmarks.packed_memory [--repeats 3]

SmolLM2's Q4_1 file, its blocks held as they are (``--quantize auto``). What an idle node's process holds without a
shard is measured beside it and taken off: a node that waits for its layers. By what the file holds of the half,
embeddings included: the memory once the layers are loaded, and once an answer has been given; and the most that it ever
was, loading included.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import environment
from benchmarks.figures import Interval
from benchmarks.memory import rss
from benchmarks.mesh_processes import MeshProcesses, NodeOptions, default_threads, mesh_processes, waiting_node
from benchmarks.mesh_system import mesh_system
from benchmarks.models import MODELS, PreparedModel, prepare
from benchmarks.results import add_options, publish_drawn
from benchmarks.verdict import Verdict
from meshnet_core.layer_range import LayerRange

MODEL = "smollm2"
TARGET = 1.25  # of the packed bytes, beyond an idle node
TOKENS = 16
MEGA = 10**6
LOADED, SERVED, PEAK = "loaded", "after an answer", "most ever"


@dataclass(slots=True)
class Half:
    """One node. Bytes beyond an idle node's by moment, one for each repeat.

    Attributes:
        packed: bytes of its tensors in the file.
    """

    layers: str
    packed: int
    beyond: dict[str, list[int]] = field(default_factory=lambda: {LOADED: [], SERVED: [], PEAK: []})

    def by_packed(self, moment: str) -> Interval:
        return Interval.of(beyond / self.packed for beyond in self.beyond[moment])


def packed_bytes(tensors: Iterable[tuple[str, int]], layers: LayerRange, num_layers: int) -> int:
    """Bytes of the tensors that ``layers`` need, embeddings and the tied output projection included.

    Args:
        tensors: name and bytes of each tensor of a GGUF file.
    """
    held = 0
    by_name = dict(tensors)
    for name, nbytes in by_name.items():
        kind, _, rest = name.partition(".")
        if kind == "blk":
            held += nbytes if int(rest.partition(".")[0]) in range(layers.start, layers.stop) else 0
        elif kind == "token_embd":
            tied = layers.stop == num_layers and "output.weight" not in by_name
            held += nbytes if layers.start == 0 or tied else 0
        elif kind in {"output_norm", "output"}:
            held += nbytes if layers.stop == num_layers else 0
    return held


async def measure(
    prepared: PreparedModel, halves: list[Half], arguments: argparse.Namespace, console: Console
) -> list[int]:
    """Fill ``halves``; returns the idle node's bytes of each repeat."""
    idle = []
    options = NodeOptions("bfloat16", arguments.threads, quantize="auto")
    for repeat in range(arguments.repeats):
        console.print(f"repeat {repeat + 1} of {arguments.repeats}", style="dim")
        with waiting_node(prepared.model, options) as pid:
            idle.append(_told(rss(pid)))
        with mesh_processes(prepared.model, [half.layers for half in halves], options) as processes:
            _note(LOADED, halves, processes, idle[-1])
            async with mesh_system("two nodes", prepared.name, processes) as mesh:
                await mesh.run(prepared.prompt, TOKENS)
            _note(SERVED, halves, processes, idle[-1])
            peaks = processes.peak_rss()
            for index, half in enumerate(halves):
                half.beyond[PEAK].append(_told(peaks[f"node-{index + 1}"]) - idle[-1])
    return idle


def _told(held: int | None) -> int:
    if held is None:
        raise RuntimeError("this system does not tell how much memory a process holds; it takes Linux")
    return held


def _note(moment: str, halves: list[Half], processes: MeshProcesses, idle: int) -> None:
    for index, half in enumerate(halves):
        half.beyond[moment].append(_told(processes.rss()[f"node-{index + 1}"]) - idle)


def verdicts(halves: list[Half]) -> dict[str, Verdict]:
    return {
        f"{half.layers}, {moment}": Verdict(
            f"RSS of layers {half.layers} of the Q4_1 file beyond an idle node, {moment}, by its packed bytes",
            half.by_packed(moment),
            TARGET,
            at_most=True,
        )
        for half in halves
        for moment in (LOADED, SERVED)
    }


def print_table(halves: list[Half], idle: list[int], console: Console) -> None:
    """The figures for people."""
    table = Table(
        title="memory of a node with half of SmolLM2's Q4_1 file, MB (10^6), beyond a node without a shard",
        caption=f"that one: {Interval.of(one / MEGA for one in idle).shown(1)} MB. by: of the packed bytes",
    )
    for title in ("layers", "packed", LOADED, "by", SERVED, "by", PEAK, "by"):
        table.add_column(title, justify="left" if title == "layers" else "right")
    for half in halves:
        cells = []
        for moment, beyond in half.beyond.items():
            cells += [Interval.of(one / MEGA for one in beyond).brief(1), half.by_packed(moment).brief()]
        table.add_row(half.layers, f"{half.packed / MEGA:.1f}", *cells)
    console.print(table)
    for verdict in verdicts(halves).values():
        console.print(verdict.shown())


def main() -> None:
    """Measure, write a table to standard error, and keep the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packed_memory", description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=default_threads(), help="of each node (default: %(default)s)")
    add_options(parser, "packed-memory")
    arguments = parser.parse_args()
    if arguments.repeats < 1 or arguments.threads < 1:
        parser.error("--repeats and --threads are at least 1")
    console = environment.begin()
    prepared = prepare(MODELS[MODEL], "bfloat16")
    ranges = [LayerRange.parse(split) for split in MODELS[MODEL].splits]
    halves = [Half(str(layers), packed_bytes(prepared.tensors, layers, ranges[-1].stop)) for layers in ranges]
    idle = asyncio.run(measure(prepared, halves, arguments, console))
    print_table(halves, idle, console)
    document: dict[str, Any] = {
        "benchmark": "packed_memory",
        "title": "memory of half the Q4_1 file",
        "model": MODEL,
        "threads": arguments.threads,
        "environment": environment.facts(),
        "idle_bytes": idle,
        "halves": {
            half.layers: {
                "packed_bytes": half.packed,
                "beyond_idle_bytes": half.beyond,
                "by_packed": {moment: half.by_packed(moment).to_json() for moment in half.beyond},
            }
            for half in halves
        },
        "verdicts": {key: verdict.to_json() for key, verdict in verdicts(halves).items()},
    }
    publish_drawn(arguments.name, document, console, line=arguments.json)


if __name__ == "__main__":
    main()
