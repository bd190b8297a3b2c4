"""How long a route takes to plan as a mesh grows.

    python -m benchmarks.planning [--nodes 10,100,1000,10000] [--layers 128] [--links 12] [--repeats 7]

Random machines of 0.1 to 1 ms a layer hold random ranges of 4 to 32 layers, or all hold eight layers, and know links to
so many of those that may come next, of 0.3 to 40 ms. *Alike* are machines that differ in nothing but their links. Each
plan is of other draws; the table has medians, with the slowest in parentheses.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from benchmarks import environment
from benchmarks.figures import Spread
from benchmarks.results import publish
from meshnet_core.estimate import Evidence
from meshnet_core.exploration import EXPLORE_SHARE
from meshnet_core.layer_range import LayerRange
from meshnet_core.link_info import LinkInfo
from meshnet_core.membership import NodeInfo, ShardInfo, Snapshot
from meshnet_core.planning import plan_route

KINDS = ("random", "alike")


@dataclass(frozen=True)
class Figure:
    """One row: milliseconds."""

    kind: str
    nodes: int
    layers: int
    links: int
    hops: int
    plain: dict[str, float]
    drawn: dict[str, float]
    exploring: dict[str, float]


def mesh(kind: str, count: int, layers: int, links: int, seed: int = 7) -> Snapshot:
    """Machines as the module's docstring tells."""
    rng = random.Random(seed)
    ranges = [_range(kind, index, layers, rng) for index in range(count)]
    begin_at: defaultdict[int, list[int]] = defaultdict(list)  # by layer: who holds it
    for index, held in enumerate(ranges):
        for layer in range(held.start, held.stop):
            begin_at[layer].append(index)
    return Snapshot(
        tuple(
            NodeInfo(
                node_id=f"n{index:05}",
                url=f"http://n{index:05}:7410",
                boot="b",
                version="0.1.0",
                device="cuda",
                shards=(_shard(kind, held, layers, rng),),
                sessions=0 if kind == "alike" else rng.randrange(4),
                links=tuple(
                    LinkInfo(f"n{other:05}", rng.choice([0.3, 0.5, 1.0, 10.0, 40.0]), Evidence(0.01, 20, 5.0))
                    for other in rng.sample(begin_at[held.stop], min(links, len(begin_at[held.stop])))
                ),
            )
            for index, held in enumerate(ranges)
        )
    )


def _range(kind: str, index: int, layers: int, rng: random.Random) -> LayerRange:
    step = 8
    if kind == "alike" or index < layers // step:  # so that every layer is held
        start = index * step % layers
        return LayerRange(start, min(layers, start + step))
    start = rng.randrange(layers - 4)
    return LayerRange(start, min(layers, start + rng.randrange(4, 33)))


def _shard(kind: str, held: LayerRange, layers: int, rng: random.Random) -> ShardInfo:
    return ShardInfo(
        model="m",
        fingerprint="f",
        layers=held,
        num_layers=layers,
        hidden_size=8192,
        max_positions=8192,
        dtype="bfloat16",
        decode_ms=0.5 if kind == "alike" else rng.uniform(0.1, 1),
        decode_evidence=Evidence(0.0025, 100, 5.0),
    )


def measure(kind: str, count: int, layers: int, links: int, repeats: int) -> Figure:
    """Plans without a draw, with one, and with one that explores."""
    snapshot = mesh(kind, count, layers, links)
    rng = random.Random(1)

    def timed(draw: Callable[[], float | None]) -> dict[str, float]:
        return Spread.of(_plan_ms(snapshot, draw()) for _ in range(repeats)).to_json()

    return Figure(
        kind,
        count,
        layers,
        links,
        len(plan_route(snapshot, "m").hops),
        timed(lambda: None),
        timed(lambda: rng.uniform(EXPLORE_SHARE, 1)),
        timed(lambda: rng.uniform(0, EXPLORE_SHARE)),
    )


def _plan_ms(snapshot: Snapshot, draw: float | None) -> float:
    began = time.perf_counter()
    plan_route(snapshot, "m", draw=draw)
    return 1000 * (time.perf_counter() - began)


def main() -> None:
    """Measure, and write a table to standard error and a JSON line to standard output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", default="30,100,300,1000,3000,10000", help="with commas (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--links", type=int, default=12, help="that each machine knows (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="default: %(default)s")
    arguments = parser.parse_args()
    figures = [
        measure(kind, int(count), arguments.layers, arguments.links, arguments.repeats)
        for kind in KINDS
        for count in arguments.nodes.split(",")
    ]
    table = Table("machines", "nodes", "hops", "plan, ms", "with a draw", "exploring")
    for one in figures:
        times = (f"{ms['median']:.1f} ({ms['high']:.1f})" for ms in (one.plain, one.drawn, one.exploring))
        table.add_row(one.kind, str(one.nodes), str(one.hops), *times)
    Console(stderr=True, width=None if sys.stderr.isatty() else 120).print(table)
    publish(
        "planning",
        {
            "benchmark": "planning",
            "environment": environment.facts(),
            "figures": [asdict(one) for one in figures],
        },
    )


if __name__ == "__main__":
    main()
