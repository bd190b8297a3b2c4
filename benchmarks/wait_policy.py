"""What the idle threads of nodes that share cores should do: sleep at once, spin for a while, or spin on.

    python -m benchmarks.wait_policy [--model smollm2] [--policies meshnet,library,passive,spin:10000,pinned:60000]

One mesh of two nodes for each policy, and `generate()`, all started and in turns, as in `bench`. Between two parallel
regions OpenMP's threads wait for the next; spinning, they are there at once, but the cores that the other node needs
are taken meanwhile. `meshnet` is what `meshnet up` sets, `pinned:N` that with N spins, `spin:N` N spins alone;
`library` is what libgomp does when it is told nothing.
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import AsyncExitStack
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import environment
from benchmarks.busy import QUIET_CORES, BusyWatch
from benchmarks.environment import begin
from benchmarks.figures import Spread, ratios
from benchmarks.generate import GENERATE, generate_system
from benchmarks.measurement import WARM_UP_TOKENS
from benchmarks.mesh_processes import NodeOptions, default_threads, mesh_processes
from benchmarks.mesh_system import mesh_system
from benchmarks.models import MODELS, prepare
from benchmarks.results import publish
from benchmarks.systems import Run, System

POLICIES = "meshnet,library,passive,spin:10000,pinned:60000"


async def measure(arguments: argparse.Namespace, console: Console) -> dict[str, list[Run]]:
    """Runs by policy, ``generate()`` first, one for each repeat."""
    model = MODELS[arguments.model]
    prepared = prepare(model, arguments.dtype)
    threads = arguments.threads
    runs: dict[str, list[Run]] = {}
    async with AsyncExitStack() as running:
        generate = generate_system(prepared.folder, dtype=arguments.dtype, device="cpu", threads=threads)
        systems: dict[str, System] = {GENERATE: await running.enter_async_context(generate)}
        for policy in arguments.policies.split(","):
            options = NodeOptions(arguments.dtype, threads, wait_policy=policy)
            console.print(f"starting two nodes: {policy} {options.environment(len(model.splits), 0)}", style="dim")
            mesh = running.enter_context(mesh_processes(prepared.model, model.splits, options))
            systems[policy] = await running.enter_async_context(mesh_system(policy, prepared.name, mesh))
        for system in systems.values():
            await system.run(prepared.prompt, WARM_UP_TOKENS)
        for repeat in range(arguments.repeats):
            console.print(f"repeat {repeat + 1} of {arguments.repeats}", style="dim")
            for name in list(systems) if repeat % 2 == 0 else list(systems)[::-1]:
                with BusyWatch() as busy:
                    run = await systems[name].run(prepared.prompt, arguments.new_tokens)
                run.facts.update(busy.to_json())
                runs.setdefault(name, []).append(run)
    return runs


def document(runs: dict[str, list[Run]], arguments: argparse.Namespace) -> dict[str, Any]:
    """The JSON form."""
    theirs = [run.times.tokens_per_s for run in runs[GENERATE]]
    return {
        "benchmark": "wait-policy",
        "model": arguments.model,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "new_tokens": arguments.new_tokens,
        "environment": environment.facts(),
        "busy_elsewhere": max(run.facts["busy_elsewhere"] for found in runs.values() for run in found),
        "policies": {
            name: {
                "tokens_per_s": Spread.of(run.times.tokens_per_s for run in found).to_json(),
                "by_generate": ratios([run.times.tokens_per_s for run in found], theirs).to_json(),
                "ttft_s": Spread.of(run.times.ttft_s for run in found).to_json(),
                "busy_cores": Spread.of(run.facts["busy_cores"] for run in found).to_json(),
            }
            for name, found in runs.items()
        },
    }


def print_table(runs: dict[str, list[Run]], arguments: argparse.Namespace, console: Console) -> None:
    """The figures for people."""
    table = Table(
        title=f"{MODELS[arguments.model].title}, {arguments.dtype}: two nodes of {arguments.threads} threads on "
        f"{environment.cores()} cores, by what waiting threads do"
    )
    for title in ("nodes' policy", "tokens/s", f"by {GENERATE}", "first token, s", "cores used"):
        table.add_column(title, justify="left" if title == "nodes' policy" else "right")
    theirs = [run.times.tokens_per_s for run in runs[GENERATE]]
    for name, found in runs.items():
        table.add_row(
            name,
            Spread.of(run.times.tokens_per_s for run in found).shown(),
            ratios([run.times.tokens_per_s for run in found], theirs).shown(3),
            Spread.of(run.times.ttft_s for run in found).shown(3),
            Spread.of(run.facts["busy_cores"] for run in found).shown(),
        )
    console.print(table)
    elsewhere = max(run.facts["busy_elsewhere"] for found in runs.values() for run in found)
    if elsewhere > QUIET_CORES:
        console.print(f"DOUBTFUL: up to {elsewhere:.2f} cores did other work; measure on a quiet machine")


def main() -> None:
    """Measure, and write a table to standard error, and keep the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wait_policy", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="default: %(default)s")
    parser.add_argument("--policies", default=POLICIES, help="with commas (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--threads", type=int, default=default_threads(), help="default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="default: %(default)s")
    arguments = parser.parse_args()
    if arguments.new_tokens < 2 or arguments.repeats < 1 or arguments.threads < 1:
        parser.error("--new-tokens is at least 2, --repeats and --threads are at least 1")
    try:
        for policy in arguments.policies.split(","):
            NodeOptions(arguments.dtype, arguments.threads, wait_policy=policy).environment(2, 0)
    except ValueError as error:
        parser.error(str(error))
    console = begin()
    runs = asyncio.run(measure(arguments, console))
    print_table(runs, arguments, console)
    publish(f"wait-policy-{arguments.model}", document(runs, arguments))


if __name__ == "__main__":
    main()
