"""The last turn of a chat with and without what earlier turns left: time to its first token, side by side.

    python -m benchmarks.prefix_reuse [--models smollm2,qwen3.5-moe] [--turns 5] [--repeats 3]

Two nodes; a system prompt of 300 tokens, questions of 40, answers of 64. In each repeat the same chat is had twice, in
turns: once without prefixes, so that every turn prefills all that was said, and once with them. Both are asked the same
tokens, those of the answers without; how many tokens of the last answer agree is told.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import environment
from benchmarks.busy import QUIET_CORES, BusyWatch
from benchmarks.figures import Spread, agreement, ratios
from benchmarks.mesh_processes import NodeOptions, default_threads, mesh_processes
from benchmarks.mesh_system import MeshSystem, mesh_system
from benchmarks.models import MODELS, prepare
from benchmarks.results import publish
from benchmarks.systems import Run
from meshnet_gateway.prefix_reuse import PrefixWish

SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 300, 40, 64
WARM_UP_TOKENS = 8
Prompt = tuple[int, ...]


@dataclass(slots=True)
class Found:
    """Seconds to the first token of the last turn, one for each repeat."""

    without: list[float] = field(default_factory=list)
    reused: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: list[int] = field(default_factory=list)
    same_tokens: list[int] = field(default_factory=list)
    busy_elsewhere: float = 0.0


async def measure(mesh: MeshSystem, material: Prompt, turns: int, repeats: int, console: Console) -> Found:
    """``material``: real token ids; questions and the system prompt are made of them, each turned by some places."""
    found = Found()
    await mesh.run(material, WARM_UP_TOKENS)
    with BusyWatch() as busy:
        for repeat in range(repeats):
            console.print(f"repeat {repeat + 1} of {repeats}", style="dim")
            said = part_of(material, SYSTEM_TOKENS, repeat)
            ended: tuple[int, ...] = ()  # where the turn before ended, and may have been left
            for turn in range(turns):
                said += part_of(material, QUESTION_TOKENS, turn + 1)
                wish = PrefixWish(f"repeat-{repeat}", (SYSTEM_TOKENS, len(said) - 1), ended)
                plain, reused = await mesh.run(said, ANSWER_TOKENS), await mesh.run(said, ANSWER_TOKENS, wish)
                said += plain.tokens
                ended = (len(said) - 1, len(said))
            take(found, plain, reused)
            found.prompt_tokens = len(said) - ANSWER_TOKENS
    found.busy_elsewhere = busy.elsewhere
    return found


def take(found: Found, plain: Run, reused: Run) -> None:
    found.without.append(plain.times.ttft_s)
    found.reused.append(reused.times.ttft_s)
    found.cached_tokens.append(int(reused.facts["cached_tokens"]))
    found.same_tokens.append(agreement(reused.tokens, plain.tokens))


def part_of(material: Prompt, length: int, turned: int) -> Prompt:
    start = turned % len(material)
    return ((material[start:] + material[:start]) * (length // len(material) + 1))[:length]


def document(key: str, found: Found, arguments: argparse.Namespace) -> dict[str, Any]:
    """The JSON form."""
    return {
        "benchmark": "prefix_reuse",
        "model": MODELS[key].title,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "turn": arguments.turns,
        "environment": environment.facts(),
        "prompt_tokens": found.prompt_tokens,
        "cached_tokens": min(found.cached_tokens),
        "first_token_s": Spread.of(found.without).to_json(),
        "first_token_s_reused": Spread.of(found.reused).to_json(),
        "ratio": ratios(found.reused, found.without).to_json(),
        "same_tokens": min(found.same_tokens),
        "busy_elsewhere": round(found.busy_elsewhere, 2),
    }


def print_table(key: str, found: Found, arguments: argparse.Namespace, console: Console) -> None:
    """The figures for people."""
    table = Table(title=f"turn {arguments.turns} of a chat, {MODELS[key].title}, {arguments.dtype}, two nodes")
    for name in ("", "tokens prefilled", "first token after, s: median (least-greatest)"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("without reuse", str(found.prompt_tokens), Spread.of(found.without).shown(3))
    computed = found.prompt_tokens - min(found.cached_tokens)
    table.add_row("with reuse", str(computed), Spread.of(found.reused).shown(3))
    console.print(table)
    same = min(found.same_tokens)
    console.print(
        f"with by without: {ratios(found.reused, found.without).shown()}; {same} of {ANSWER_TOKENS} tokens agree"
    )
    if found.busy_elsewhere > QUIET_CORES:
        console.print(
            f"DOUBTFUL: {found.busy_elsewhere:.2f} cores did other work meanwhile; measure on a quiet machine"
        )


async def run(key: str, arguments: argparse.Namespace, console: Console) -> Found:
    """Start the mesh, measure, stop it."""
    model = MODELS[key]
    prepared = prepare(model, arguments.dtype)
    options = NodeOptions(arguments.dtype, arguments.threads)
    with mesh_processes(prepared.model, model.splits, options) as processes:
        async with mesh_system("two nodes", prepared.name, processes) as mesh:
            return await measure(mesh, prepared.prompt, arguments.turns, arguments.repeats, console)


def main() -> None:
    """Measure, and write a table to standard error, and keep a result for each model."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix_reuse", description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="smollm2,qwen3.5-moe", help="keys, with commas (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=default_threads(), help="of each node (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    arguments = parser.parse_args()
    keys = arguments.models.split(",")
    if unknown := [key for key in keys if key not in MODELS]:
        parser.error(f"unknown models {', '.join(unknown)}; there are {', '.join(MODELS)}")
    if arguments.turns < 2 or arguments.repeats < 1:
        parser.error("--turns is at least 2, --repeats 1")
    console = environment.begin()
    for key in keys:
        found = asyncio.run(run(key, arguments, console))
        print_table(key, found, arguments, console)
        publish(f"prefix-reuse-{key}", document(key, found, arguments))


if __name__ == "__main__":
    main()
