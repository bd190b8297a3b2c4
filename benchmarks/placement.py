"""How long placing takes as a mesh grows, how far from the best possible its slowest part is, and what churn moves.

    python -m benchmarks.placement [--nodes 10,100,1000,10000] [--layers 128] [--repeats 5] [--json FILE]

On the real `place` and `replan`, with random machines (8 to 80 GiB, 0.1 to 3 ms a layer, 0.3 to 1 ms a hop, a third
hybrids whose layers differ). *Bound*: no cover can have a faster slowest part, since under that limit even all machines
together, each counted by what it could run in the best place, run fewer layers than the model has.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass, replace
from math import floor, inf
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import environment
from meshnet_core.model_facts import ModelFacts
from meshnet_tracker.machine import Machine
from meshnet_tracker.placement import place
from meshnet_tracker.replan import replan


@dataclass(frozen=True)
class Figure:
    """One row: medians over the repeats, times in milliseconds."""

    nodes: int
    layers: int
    alike: bool
    place_ms: float
    join_ms: float
    death_ms: float
    parts: float
    above_bound: float
    moved_by_a_death: float


def model(layers: int, *, alike: bool) -> ModelFacts:
    """About 30 billion elements; where layers are not alike, every fourth is half again as large."""
    sizes = tuple(230_000_000 if alike or index % 4 else 345_000_000 for index in range(layers))
    return ModelFacts("m", "f", sizes, 600_000_000, 600_000_000, 0, room=8_000_000)


def machines(count: int, draw: random.Random) -> list[Machine]:
    return [
        Machine(f"n{i:05}", draw.randrange(8, 80) * 2**30, 2, draw.uniform(0.1, 3), draw.uniform(0.3, 1))
        for i in range(count)
    ]


def bound_ms(mesh: list[Machine], facts: ModelFacts) -> float:
    """No cover's slowest part is faster; see the module's docstring."""
    smallest = min(facts.layers) + facts.room

    def layers_within(limit: float) -> int:
        return sum(max(0, min(floor((limit - m.hop_ms) / m.layer_ms), m.memory // m.width // smallest)) for m in mesh)

    low, high = 0.0, 1e6
    while high - low > high * 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if layers_within(middle) >= facts.num_layers else (middle, high)
    return low


def measure(nodes: int, layers: int, *, alike: bool, repeats: int) -> Figure:
    """Place anew, let one join, let one that the cover needs die."""
    rows = []
    for seed in range(repeats):
        draw = random.Random(seed)
        facts, mesh = model(layers, alike=alike), machines(nodes, draw)
        began = time.perf_counter()
        placed = place(mesh, facts)
        place_s = time.perf_counter() - began
        standing = [replace(m, held=placed.ranges.get(m.name)) for m in mesh]
        newcomer = replace(machines(1, draw)[0], name="newcomer")
        began = time.perf_counter()
        replan([*standing, newcomer], facts)
        join_s = time.perf_counter() - began
        dead = placed.cover[len(placed.cover) // 2].machine.name if placed.cover else mesh[0].name
        left = [m for m in standing if m.name != dead]
        began = time.perf_counter()
        after = replan(left, facts)
        death_s = time.perf_counter() - began
        moved = sum(after.ranges.get(m.name) != m.held for m in left)
        above = placed.slowest_ms / bound_ms(mesh, facts) - 1 if placed.slowest_ms < inf else inf
        rows.append((1000 * place_s, 1000 * join_s, 1000 * death_s, len(placed.cover or ()), above, moved))
    medians = [round(statistics.median(column), 3) for column in zip(*rows, strict=True)]
    return Figure(nodes, layers, alike, *medians)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="10,30,100,300,1000,3000,10000")
    parser.add_argument("--layers", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.nodes.split(",")]
    figures = [
        measure(count, arguments.layers, alike=alike, repeats=arguments.repeats)
        for alike in (True, False)
        for count in counts
    ]
    table = Table(
        "nodes", "layers alike", "place ms", "a join ms", "a death ms", "parts", "above bound", "moved by a death"
    )
    for f in figures:
        above = f"{f.above_bound:.1%}" if f.above_bound < inf else "does not fit"
        times = (f"{ms:.1f}" for ms in (f.place_ms, f.join_ms, f.death_ms))
        table.add_row(str(f.nodes), str(f.alike), *times, f"{f.parts:g}", above, f"{f.moved_by_a_death:g}")
    Console(width=120).print(table)
    if arguments.json:
        document = {"environment": environment.facts(), "placement": [asdict(figure) for figure in figures]}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
