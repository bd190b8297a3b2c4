"""Many clients at once over two nodes: their tokens per second together, by one client's alone; and beside a prefill.

    python -m benchmarks.concurrency [--model smollm2] [--clients 1,2,4,8,16] [--new-tokens 64] [--repeats 3] ...

One thread a node, different prompts of one length. While one node works on some sessions the other works on
others, and steps that wait at a node together run in one forward, which reads the weights once for all. In each repeat
one client makes its request, then so many at once; speeds are all tokens by the time from the first request to the last
token, prefills included, and every answer is compared with the one that its prompt gets alone. Then a long prompt is
sent while others decode (`benchmarks.prefill_beside`).
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import environment
from benchmarks.busy import QUIET_CORES, BusyWatch
from benchmarks.figures import Interval, agreement, mean_batch, paired
from benchmarks.mesh_processes import NodeOptions, mesh_processes
from benchmarks.mesh_system import MeshSystem, mesh_system
from benchmarks.models import MODELS, prepare
from benchmarks.prefill_beside import PREFILL_TOKENS, Beside, measure_beside
from benchmarks.results import add_options, publish_drawn
from benchmarks.systems import Run
from benchmarks.verdict import Verdict

SPEED_TARGET = 4.0  # eight clients together, by one alone
TARGET_CLIENTS = 8
WARM_UP_TOKENS = 8
Prompt = tuple[int, ...]


@dataclass(slots=True)
class Found:
    """Of each repeat, by the number of clients.

    Attributes:
        speed: tokens per second together.
        ttft_s: first tokens' waits.
        same_tokens: in how many tokens answers agree with those given alone.
        frames: decode steps in one forward, the mean over all nodes.
    """

    speed: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    ttft_s: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    same_tokens: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    frames: defaultdict[int, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(dict))
    beside: Beside | None = None
    busy_elsewhere: float = 0.0
    peak_rss: dict[str, int | None] = field(default_factory=dict)

    def ratio(self, clients: int) -> Interval:
        """So many clients' speed by one's, within each repeat."""
        return Interval.of(paired(self.speed[clients], self.speed[1]))

    def verdicts(self) -> dict[str, Verdict]:
        """Of what was measured."""
        asked = {}
        if TARGET_CLIENTS in self.speed:
            what = f"tokens/s of {TARGET_CLIENTS} sessions together by one's"
            asked["together"] = Verdict(what, self.ratio(TARGET_CLIENTS), SPEED_TARGET)
        if self.beside is not None:
            asked["beside"] = self.beside.verdict()
        return asked


def prompts_of(prompt: Prompt, clients: int) -> list[Prompt]:
    """One prompt for each client, all different and of one length.

    Args:
        prompt: a real prompt, whose tokens are the material: turned by some places, it is another prompt.
    """
    return [prompt[index:] + prompt[:index] for index in range(clients)]


async def measure(mesh: MeshSystem, prompts: list[Prompt], arguments: argparse.Namespace, console: Console) -> Found:
    """In turns: one client, then two, ...; and the long prefill beside others."""
    found = Found()
    new_tokens, repeats = arguments.new_tokens, arguments.repeats
    with BusyWatch() as busy:
        console.print("each prompt alone", style="dim")
        alone = [await mesh.run(prompt, new_tokens) for prompt in prompts]
        for repeat in range(repeats):
            for clients in arguments.clients:
                console.print(f"repeat {repeat + 1} of {repeats}: clients: {clients}", style="dim")
                before = mesh.batches()
                began = time.perf_counter()
                given: list[Run] = await asyncio.gather(*(mesh.run(prompt, new_tokens) for prompt in prompts[:clients]))
                found.speed[clients].append(clients * new_tokens / (time.perf_counter() - began))
                for node, after in mesh.batches().items():
                    found.frames[clients].setdefault(node, []).append(mean_batch(before[node], after))
                found.ttft_s[clients].extend(run.times.ttft_s for run in given)
                found.same_tokens[clients].extend(
                    agreement(one.tokens, other.tokens) for one, other in zip(given, alone, strict=False)
                )
        if arguments.others:
            others = prompts[: arguments.others]
            found.beside = await measure_beside(mesh, others, arguments.prefill, repeats, console)
    found.busy_elsewhere = busy.elsewhere
    found.peak_rss = mesh.peak_rss()
    return found


def document(found: Found, arguments: argparse.Namespace) -> dict[str, Any]:
    """The JSON form."""
    return {
        "benchmark": "concurrency",
        "model": arguments.model,
        "title": f"sessions at once: {MODELS[arguments.model].title}, {arguments.dtype}",
        "dtype": arguments.dtype,
        "new_tokens": arguments.new_tokens,
        "threads": arguments.threads,
        "environment": environment.facts(),
        "clients": {
            str(clients): {
                "tokens_per_s": Interval.of(found.speed[clients]).to_json(),
                "ratio": found.ratio(clients).to_json(),
                "first_token_s": Interval.of(found.ttft_s[clients]).to_json(),
                "steps_in_one_forward": {
                    node: Interval.of(means).to_json() for node, means in found.frames[clients].items()
                },
                "same_tokens_as_alone": min(found.same_tokens[clients]),
            }
            for clients in arguments.clients
        },
        "target": {"clients": TARGET_CLIENTS, "ratio": SPEED_TARGET},
        "verdicts": {key: verdict.to_json() for key, verdict in found.verdicts().items()},
        "prefill": None if found.beside is None else found.beside.to_json(),
        "busy_elsewhere": round(found.busy_elsewhere, 2),
        "peak_rss": found.peak_rss,
    }


def print_tables(found: Found, arguments: argparse.Namespace, console: Console) -> None:
    """The figures for people."""
    title = MODELS[arguments.model].title
    confidence = found.ratio(1).confidence
    table = Table(
        title=f"clients at once: {title}, {arguments.dtype}, two nodes of {arguments.threads} thread each",
        caption=f"median (interval of confidence {confidence:.2f}) of {arguments.repeats} repeats",
    )
    titles = (
        "clients",
        "tokens/s together",
        "by one client's",
        "steps in one forward",
        "first token, s",
        "same tokens",
    )
    for title in titles:
        table.add_column(title, justify="right")
    for clients in arguments.clients:
        frames = " / ".join(Interval.of(means).brief(1) for means in found.frames[clients].values())
        table.add_row(
            str(clients),
            Interval.of(found.speed[clients]).brief(1),
            found.ratio(clients).brief(),
            frames,
            Interval.of(found.ttft_s[clients]).brief(),
            f"{min(found.same_tokens[clients])} of {arguments.new_tokens}",
        )
    console.print(table)
    if found.beside is not None:
        found.beside.print(console)
    for verdict in found.verdicts().values():
        console.print(verdict.shown())
    if found.busy_elsewhere > QUIET_CORES:
        console.print(
            f"DOUBTFUL: {found.busy_elsewhere:.2f} cores did other work meanwhile; measure on a quiet machine"
        )


async def run(arguments: argparse.Namespace, console: Console) -> Found:
    """Start the mesh, measure, stop it."""
    model = MODELS[arguments.model]
    prepared = prepare(model, arguments.dtype)
    options = NodeOptions(arguments.dtype, arguments.threads)
    with mesh_processes(prepared.model, model.splits, options) as processes:
        async with mesh_system("two nodes", prepared.name, processes) as mesh:
            prompts = prompts_of(prepared.prompt, max(*arguments.clients, arguments.others))
            await mesh.run(prompts[0], WARM_UP_TOKENS)
            return await measure(mesh, prompts, arguments, console)


def _numbers(text: str) -> list[int]:
    """``1,2,8`` as numbers that rise from 1."""
    numbers = sorted({int(part) for part in text.split(",")})
    if numbers[0] != 1:
        raise argparse.ArgumentTypeError("the first number of clients is 1, which the others are compared with")
    return numbers


def main() -> None:
    """Measure, write tables to standard error, and keep the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.concurrency", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="default: %(default)s")
    parser.add_argument(
        "--clients", type=_numbers, default="1,2,4,8,16", help="how many at once, 1 first (default: %(default)s)"
    )
    parser.add_argument("--new-tokens", type=int, default=64, help="of each answer (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--others",
        type=int,
        default=7,
        help="who decode beside a long prefill; 0 leaves that out (default: %(default)s)",
    )
    parser.add_argument(
        "--prefill", type=int, default=PREFILL_TOKENS, help="tokens of that prefill (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=1, help="of each node (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    add_options(parser, "concurrency")
    arguments = parser.parse_args()
    if arguments.new_tokens < 2 or arguments.repeats < 1 or arguments.others < 0 or arguments.prefill < 1:
        parser.error("--new-tokens is at least 2, --repeats and --prefill 1 and --others 0")
    console = environment.begin()
    found = asyncio.run(run(arguments, console))
    print_tables(found, arguments, console)
    publish_drawn(arguments.name, document(found, arguments), console, line=arguments.json)


if __name__ == "__main__":
    main()
