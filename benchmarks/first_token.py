"""Time to the first token of a long prompt: two nodes that work on different chunks of it at once, by one node.

    python -m benchmarks.first_token [--model smollm2] [--dtypes bfloat16,float32] [--prompt 1000] [--repeats 7]

One thread a node: with one node one core works, with two both do as soon as the second has a chunk. How long
chunks are is chosen from what nodes measured of themselves; the same two nodes with chunks as long as may be stand
beside it. All take turns, and ratios are taken within each repeat.
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import environment
from benchmarks.busy import QUIET_CORES, BusyWatch
from benchmarks.figures import Interval, paired
from benchmarks.mesh_processes import NodeOptions, mesh_processes
from benchmarks.mesh_system import MeshSystem, mesh_system
from benchmarks.models import MODELS, BenchModel, prepare
from benchmarks.results import add_options, publish_drawn
from benchmarks.verdict import Verdict

ONE, TWO, LONG = "one node", "two nodes", "two nodes, longest chunks"
TARGET = 0.6  # two nodes by one, at most
NEW_TOKENS = 12  # so that decode steps are measured too: chunks are chosen by both
WARM_UPS = 2


@dataclass(slots=True)
class FirstTokens:
    """Seconds of each repeat, by system, and what the prompt was cut into."""

    dtype: str
    seconds: dict[str, list[float]] = field(default_factory=dict)
    chunks: dict[str, list[int]] = field(default_factory=dict)
    busy_elsewhere: float = 0.0

    def ratio(self, system: str) -> Interval:
        """Of a system's time by that of one node."""
        return Interval.of(paired(self.seconds[system], self.seconds[ONE]))

    def verdict(self) -> Verdict:
        return Verdict(f"first token of two nodes by one node's, {self.dtype}", self.ratio(TWO), TARGET, at_most=True)

    def to_json(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "first_token_s": {name: Interval.of(seconds).to_json() for name, seconds in self.seconds.items()},
            "repeats": self.seconds,
            "chunks": self.chunks,
            "two_by_one": self.ratio(TWO).to_json(),
            "longest_chunks_by_one": self.ratio(LONG).to_json(),
            "busy_elsewhere": round(self.busy_elsewhere, 2),
        }


def long_prompt(prompt: tuple[int, ...], length: int) -> tuple[int, ...]:
    """``prompt`` again and again, to exactly ``length`` tokens."""
    return (prompt * (length // len(prompt) + 1))[:length]


async def measure(
    model: BenchModel, dtype: str, length: int, repeats: int, threads: int, console: Console
) -> FirstTokens:
    """All systems in turns; which begins changes with every repeat."""
    prepared = prepare(model, dtype)
    prompt = long_prompt(prepared.prompt, length)
    options = NodeOptions(dtype, threads)
    whole = f"0-{model.splits[-1].partition('-')[2]}"
    found = FirstTokens(dtype)
    async with AsyncExitStack() as running:
        one = running.enter_context(mesh_processes(prepared.model, (whole,), options))
        two = running.enter_context(mesh_processes(prepared.model, model.splits, options))
        systems: list[MeshSystem] = [
            await running.enter_async_context(mesh_system(name, prepared.name, processes, measured=name != LONG))
            for name, processes in ((ONE, one), (TWO, two), (LONG, two))
        ]
        for system in systems * WARM_UPS:
            console.print(f"{dtype}: warming up {system.name}", style="dim")
            await system.run(prompt, NEW_TOKENS)
        with BusyWatch() as busy:
            for repeat in range(repeats):
                for system in systems if repeat % 2 == 0 else systems[::-1]:
                    run = await system.run(prompt, NEW_TOKENS)
                    found.seconds.setdefault(system.name, []).append(round(run.times.ttft_s, 4))
                    found.chunks[system.name] = run.facts["chunks"]
                took = ", ".join(f"{name} {seconds[-1]:.2f} s" for name, seconds in found.seconds.items())
                console.print(f"{dtype}: repeat {repeat + 1} of {repeats}: {took}", style="dim")
        found.busy_elsewhere = busy.elsewhere
    return found


def shown_chunks(lengths: list[int]) -> str:
    """``8 of 152-104``: how many, and how long the longest and the shortest are, the last one aside."""
    whole = lengths[:-1] or lengths
    longest, shortest = max(whole), min(whole)
    return f"{len(lengths)} of {longest}" if longest == shortest else f"{len(lengths)} of {longest}-{shortest}"


def print_table(model: BenchModel, found: FirstTokens, length: int, threads: int, console: Console) -> None:
    """The figures for people."""
    title = f"first token of {length}, {model.title}, {found.dtype}, {threads} thread{'s'[: threads > 1]} a node"
    table = Table(title=title)
    table.add_column("system")
    for title in ("seconds", "by one node", "chunks"):
        table.add_column(title, justify="right")
    for name, seconds in found.seconds.items():
        ratio = "" if name == ONE else found.ratio(name).shown(3)
        table.add_row(name, Interval.of(seconds).shown(3), ratio, shown_chunks(found.chunks[name]))
    console.print(table)
    console.print(found.verdict().shown())
    if found.busy_elsewhere > QUIET_CORES:
        console.print(
            f"DOUBTFUL: {found.busy_elsewhere:.2f} cores did other work meanwhile; measure on a quiet machine"
        )


def main() -> None:
    """Measure, write tables to standard error, and keep the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_token", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="default: %(default)s")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="with commas (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="of each node (default: %(default)s)")
    add_options(parser, "first-token")
    arguments = parser.parse_args()
    if arguments.prompt < 1 or arguments.repeats < 1 or arguments.threads < 1:
        parser.error("--prompt, --repeats and --threads are at least 1")
    console, model = environment.begin(), MODELS[arguments.model]
    length, repeats, threads = arguments.prompt, arguments.repeats, arguments.threads
    found = []
    for dtype in arguments.dtypes.split(","):
        found.append(asyncio.run(measure(model, dtype, length, repeats, threads, console)))
        print_table(model, found[-1], length, threads, console)
    document = {
        "benchmark": "first_token",
        "model": model.key,
        "title": f"first token of {length}: {model.title}",
        "prompt_tokens": arguments.prompt,
        "threads": arguments.threads,
        "environment": environment.facts(),
        "target": TARGET,
        "found": [one.to_json() for one in found],
        "verdicts": {one.dtype: one.verdict().to_json() for one in found},
        "busy_elsewhere": round(max(one.busy_elsewhere for one in found), 2),
    }
    publish_drawn(arguments.name, document, console, line=arguments.json)


if __name__ == "__main__":
    main()
