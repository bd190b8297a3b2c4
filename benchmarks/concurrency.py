"""Eight clients at once over two nodes: their tokens per second together, by one client's alone.

    python -m benchmarks.concurrency [--clients 8] [--new-tokens 64] [--repeats 3]

fp32 SmolLM2, one thread a node, different prompts, two of them after the same long system prompt. While one node works
on one session, the other works on another; what one client leaves idle, several use. The same requests are made one
after the other, by one client, and all at once; speeds are all tokens by the time from the first request to the last
token, prefills included, and every answer is compared with the one that its prompt gets alone.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import environment
from benchmarks.busy import QUIET_CORES, BusyWatch
from benchmarks.figures import Spread, agreement, ratios
from benchmarks.mesh_processes import NodeOptions, mesh_processes
from benchmarks.mesh_system import MeshSystem, mesh_system
from benchmarks.models import MODELS, prepare
from benchmarks.results import publish
from benchmarks.systems import Run

SPEED_TARGET = 1.5  # eight clients together, by one alone
MODEL = "smollm2"
SYSTEM_PROMPT_TOKENS = 200
WARM_UP_TOKENS = 8
Prompt = tuple[int, ...]


@dataclass(slots=True)
class Found:
    """Tokens per second of each repeat, the first tokens' waits, and how far answers agree with those given alone."""

    alone: list[float] = field(default_factory=list)
    together: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    same_tokens: list[int] = field(default_factory=list)
    busy_elsewhere: float = 0.0
    peak_rss: dict[str, int | None] = field(default_factory=dict)


def prompts_of(prompt: Prompt, clients: int) -> list[Prompt]:
    """One prompt for each client, all different; the last two begin with the same long text.

    Args:
        prompt: a real prompt, whose tokens are the material: turned by some places, it is another prompt.
    """
    turned = [prompt[index:] + prompt[:index] for index in range(clients)]
    system = (prompt * (SYSTEM_PROMPT_TOKENS // len(prompt) + 1))[:SYSTEM_PROMPT_TOKENS]
    return [*turned[:-2], *(system + own for own in turned[-2:])]


async def measure(mesh: MeshSystem, prompts: list[Prompt], new_tokens: int, repeats: int, console: Console) -> Found:
    """In turns: each prompt after the other, then all at once."""
    found = Found()
    tokens = new_tokens * len(prompts)
    await mesh.run(prompts[0], WARM_UP_TOKENS)
    with BusyWatch() as busy:
        for repeat in range(repeats):
            console.print(f"repeat {repeat + 1} of {repeats}: one client", style="dim")
            began = time.perf_counter()
            alone = [await mesh.run(prompt, new_tokens) for prompt in prompts]
            found.alone.append(tokens / (time.perf_counter() - began))
            console.print(f"repeat {repeat + 1} of {repeats}: {len(prompts)} clients", style="dim")
            began = time.perf_counter()
            together: list[Run] = await asyncio.gather(*(mesh.run(prompt, new_tokens) for prompt in prompts))
            found.together.append(tokens / (time.perf_counter() - began))
            found.ttft_s.extend(run.times.ttft_s for run in together)
            found.same_tokens.extend(
                agreement(one.tokens, other.tokens) for one, other in zip(together, alone, strict=True)
            )
    found.busy_elsewhere = busy.elsewhere
    found.peak_rss = mesh.peak_rss()
    return found


def document(found: Found, arguments: argparse.Namespace) -> dict[str, Any]:
    """The JSON form."""
    return {
        "benchmark": "concurrency",
        "model": MODEL,
        "dtype": arguments.dtype,
        "clients": arguments.clients,
        "new_tokens": arguments.new_tokens,
        "threads": arguments.threads,
        "environment": environment.facts(),
        "one_client_tokens_per_s": Spread.of(found.alone).to_json(),
        "all_clients_tokens_per_s": Spread.of(found.together).to_json(),
        "ratio": ratios(found.together, found.alone).to_json(),
        "first_token_s": Spread.of(found.ttft_s).to_json(),
        "same_tokens_as_alone": min(found.same_tokens),
        "busy_elsewhere": round(found.busy_elsewhere, 2),
        "target": SPEED_TARGET,
        "peak_rss": found.peak_rss,
    }


def print_table(found: Found, arguments: argparse.Namespace, console: Console) -> None:
    """The figures for people."""
    table = Table(
        title=f"{arguments.clients} clients at once, SmolLM2 {arguments.dtype}, "
        f"two nodes of {arguments.threads} thread each"
    )
    table.add_column("figure")
    table.add_column("median (least-greatest)", justify="right")
    table.add_row("one client, one answer after the other, tokens/s", Spread.of(found.alone).shown())
    table.add_row("all clients, tokens/s together", Spread.of(found.together).shown())
    table.add_row("all clients, first token, s", Spread.of(found.ttft_s).shown())
    console.print(table)
    ratio = ratios(found.together, found.alone)
    verdict = "reached" if ratio.median >= SPEED_TARGET else "MISSED"
    console.print(f"all together by one client: {ratio.shown()}; asked: {SPEED_TARGET}: {verdict}")
    if found.busy_elsewhere > QUIET_CORES:
        console.print(
            f"DOUBTFUL: {found.busy_elsewhere:.2f} cores did other work meanwhile; measure on a quiet machine"
        )
    same = min(found.same_tokens)
    console.print(f"tokens equal to the answer given alone: at least {same} of {arguments.new_tokens}")


async def run(arguments: argparse.Namespace, console: Console) -> Found:
    """Start the mesh, measure, stop it."""
    model = MODELS[MODEL]
    prepared = prepare(model, arguments.dtype)
    options = NodeOptions(arguments.dtype, arguments.threads)
    with mesh_processes(prepared.model, model.splits, options, gateway=False) as processes:
        async with mesh_system("two nodes", prepared.name, processes) as mesh:
            prompts = prompts_of(prepared.prompt, arguments.clients)
            return await measure(mesh, prompts, arguments.new_tokens, arguments.repeats, console)


def main() -> None:
    """Measure, and write a table to standard error and a JSON line to standard output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.concurrency", description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each answer (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="of each node (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    arguments = parser.parse_args()
    if arguments.clients < 3 or arguments.new_tokens < 2 or arguments.repeats < 1:
        parser.error("--clients is at least 3, --new-tokens 2 and --repeats 1")
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 140)
    found = asyncio.run(run(arguments, console))
    print_table(found, arguments, console)
    publish("concurrency", document(found, arguments))


if __name__ == "__main__":
    main()
