"""Two nodes with a slow link between them: what a token takes without drafts, and with them.

    python -m benchmarks.slow_links [--delay-ms 20] [--tokens 120] [--repeats 5] [--dtype float32]

Each repeat takes every answer in turn: without delay, which gives the time C of a token; with the delay, where a token
should take C and what a round trip over the link adds, which an echo over one like it measures in the same repeat; and
with the delay and drafts as the gateway uses them by itself. There are two questions, one whose answer repeats what is
in it and one whose answer does not. The tokens must be the same in float32; in 16 bits it is told how many are. A relay
stands for the link (`slow_link`). A model of random weights has one prompt of random tokens, and drafts by chance.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks import environment
from benchmarks.busy import QUIET_CORES, BusyWatch
from benchmarks.figures import Interval, agreement, paired
from benchmarks.mesh_processes import NodeOptions, default_threads, mesh_processes
from benchmarks.mesh_system import MeshSystem, mesh_system
from benchmarks.models import CHATML, MODELS, QUESTION, PreparedModel, prepare
from benchmarks.results import add_options, publish_drawn
from benchmarks.slow_link import SlowLink, added_trip_s, echo_link, slow_link
from benchmarks.systems import Run
from benchmarks.verdict import Verdict
from meshnet_gateway.speculation import AUTO, OFF, Speculate

TOWNS = "Lisbon, Oslo, Quito, Hanoi, Accra, Turin, Perth, Kyoto, Leeds, Malmo, Dakar, Sofia, Tunis, Minsk, Davao, Cork"
REPEATS = "repeats"
PROMPTS = {
    REPEATS: "Copy this list of towns exactly, and then copy it again and again:\n" + TOWNS.replace(", ", "\n"),
    "does not": QUESTION,
}
WARM_UP_TOKENS = 12
Prompts = dict[str, tuple[int, ...]]  # token ids by the name of the answer
PLAIN, SLOW, DRAFTED, DRAFTED_FAST = "no delay", "delay", "delay, drafts", "no delay, drafts"
WAYS: dict[str, tuple[bool, Speculate]] = {
    PLAIN: (False, OFF),
    SLOW: (True, OFF),
    DRAFTED: (True, AUTO),
    DRAFTED_FAST: (False, AUTO),
}
WITHIN, TIMES = 1.05, 2.0  # of C and one round trip; of the tokens per second without drafts


@dataclass(slots=True)
class Found:
    """Of one question: milliseconds of a token for each way, and of a round trip, one for each repeat; and the last
    answers."""

    token_ms: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    trip_ms: list[float] = field(default_factory=list)
    runs: dict[str, Run] = field(default_factory=dict)

    def overhead(self) -> Interval:
        """Time of a token over the slow link, by C and the link's round trip as measured."""
        due = [ms + trip for ms, trip in zip(self.token_ms[PLAIN], self.trip_ms, strict=True)]
        return Interval.of(paired(self.token_ms[SLOW], due))

    def overhead_by(self, trip_ms: float) -> Interval:
        """The same by C and a round trip of so many milliseconds."""
        return Interval.of(paired(self.token_ms[SLOW], [ms + trip_ms for ms in self.token_ms[PLAIN]]))

    def gain(self, slow: str, drafted: str) -> Interval:
        """Tokens per second with drafts, by those without."""
        return Interval.of(paired(self.token_ms[slow], self.token_ms[drafted]))

    def same(self, way: str) -> int:
        """Tokens that agree with those without delay and drafts."""
        return agreement(self.runs[way].tokens, self.runs[PLAIN].tokens)


async def measure(
    mesh: MeshSystem,
    link: SlowLink,
    echo: SlowLink,
    prompts: dict[str, tuple[int, ...]],
    arguments: argparse.Namespace,
    console: Console,
) -> dict[str, Found]:
    found = {name: Found() for name in prompts}
    for prompt in prompts.values():
        await mesh.run(prompt, WARM_UP_TOKENS, speculate=AUTO)
    for repeat in range(arguments.repeats):
        console.print(f"repeat {repeat + 1} of {arguments.repeats}", style="dim")
        trip_ms = 1000 * await added_trip_s(echo, arguments.delay_ms / 1000)
        for name, prompt in prompts.items():
            found[name].trip_ms.append(trip_ms)
            for way, (late, speculate) in WAYS.items():
                link.delay_s = arguments.delay_ms / 1000 if late else 0.0
                run = await mesh.run(prompt, arguments.tokens, speculate=speculate)
                found[name].token_ms[way].append(1000 / run.times.tokens_per_s)
                found[name].runs[way] = run
    return found


def verdicts(found: dict[str, Found], arguments: argparse.Namespace) -> dict[str, Verdict]:
    """Of all answers; that drafts change no token is asked of float32 alone."""
    asked = {
        f"overhead, {name}": Verdict(
            f"ms a token by C and one round trip, no drafts, text that {name}",
            one.overhead(),
            WITHIN,
            at_most=True,
        )
        for name, one in found.items()
    }
    if REPEATS in found:
        gain = found[REPEATS].gain(SLOW, DRAFTED)
        asked["drafts"] = Verdict(f"tokens/s with drafts by those without, text that {REPEATS}", gain, TIMES)
    if arguments.dtype == "float32":
        for name, one in found.items():
            same = Interval.of([one.same(DRAFTED) / arguments.tokens])
            asked[f"same, {name}"] = Verdict(f"same tokens with drafts, text that {name}", same, 1.0)
    return asked


def print_table(found: dict[str, Found], arguments: argparse.Namespace, busy: float, console: Console) -> None:
    """The figures for people."""
    table = Table(
        title=f"two nodes, {arguments.delay_ms:g} ms each way between them, {MODELS[arguments.model].title}, "
        f"{arguments.dtype}, {arguments.threads} threads a node"
    )
    for column in (
        "answer",
        "way",
        "ms a token",
        "by C + trip",
        f"by C + {2 * arguments.delay_ms:g}",
        "tokens/s by those without",
        "drafted",
        "same",
    ):
        table.add_column(column, justify="left" if column in {"answer", "way"} else "right")
    for name, one in found.items():
        for way, token_ms in one.token_ms.items():
            gains = {DRAFTED: SLOW, DRAFTED_FAST: PLAIN}
            facts = one.runs[way].facts
            drafts = f"{facts['accepted_tokens']}/{facts['drafted_tokens']}" if way in gains else ""
            table.add_row(
                name,
                way,
                Interval.of(token_ms).shown(),
                one.overhead().shown() if way == SLOW else "",
                one.overhead_by(2 * arguments.delay_ms).shown() if way == SLOW else "",
                one.gain(gains[way], way).shown() if way in gains else "",
                drafts,
                f"{one.same(way)}/{arguments.tokens}",
            )
    console.print(table)
    trips = Interval.of(next(iter(found.values())).trip_ms)
    console.print(f"ms that a round trip over the link adds, by an echo: {trips.shown()}")
    for verdict in verdicts(found, arguments).values():
        console.print(verdict.shown())
    if busy > QUIET_CORES:
        console.print(f"DOUBTFUL: {busy:.2f} cores did other work meanwhile; measure on a quiet machine")


def document(found: dict[str, Found], arguments: argparse.Namespace, busy: float) -> dict[str, Any]:
    """The JSON form."""
    return {
        "benchmark": "slow_links",
        "model": arguments.model,
        "title": f"{arguments.delay_ms:g} ms each way: {MODELS[arguments.model].title}, {arguments.dtype}",
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "delay_ms": arguments.delay_ms,
        "tokens": arguments.tokens,
        "environment": environment.facts(),
        "answers": {
            name: {
                "token_ms": {way: Interval.of(values).to_json() for way, values in one.token_ms.items()},
                "round_trip_ms": Interval.of(one.trip_ms).to_json(),
                "by_c_and_round_trip": one.overhead().to_json(),
                "by_c_and_both_delays": one.overhead_by(2 * arguments.delay_ms).to_json(),
                "gain": one.gain(SLOW, DRAFTED).to_json(),
                "gain_without_delay": one.gain(PLAIN, DRAFTED_FAST).to_json(),
                "drafted": one.runs[DRAFTED].facts["drafted_tokens"],
                "accepted": one.runs[DRAFTED].facts["accepted_tokens"],
                "same": {way: one.same(way) for way in WAYS},
            }
            for name, one in found.items()
        },
        "verdicts": {key: verdict.to_json() for key, verdict in verdicts(found, arguments).items()},
        "busy_elsewhere": round(busy, 2),
    }


async def run(arguments: argparse.Namespace, console: Console) -> tuple[dict[str, Found], float]:
    """Start the mesh with the link in it, measure, stop it."""
    model = MODELS[arguments.model]
    prepared = prepare(model, arguments.dtype)
    prompts = {"is random": prepared.prompt} if model.random else prompts_of(prepared)
    port = free_port()
    async with slow_link(port) as link, echo_link() as echo:
        tail = ("--port", str(port), "--advertise", link.url)
        options = NodeOptions(arguments.dtype, arguments.threads)
        with mesh_processes(prepared.model, model.splits, options, of_node=((), tail)) as running:
            async with mesh_system("two nodes", prepared.name, running) as mesh:
                with BusyWatch() as busy:
                    found = await measure(mesh, link, echo, prompts, arguments, console)
    return found, busy.elsewhere


def prompts_of(prepared: PreparedModel) -> Prompts:
    """The questions as token ids of this model."""
    from meshnet_node.model_files import open_model  # noqa: PLC0415  brings torch, which --help can do without

    tokenizer = Tokenizer.from_str(open_model(prepared.model).text_files()["tokenizer.json"].decode())
    asked = {name: CHATML.format(text) for name, text in PROMPTS.items()}
    return {name: tuple(tokenizer.encode(text, add_special_tokens=False).ids) for name, text in asked.items()}


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    """Measure, write a table to standard error, and keep the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_links", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="default: %(default)s")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="each way (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=120, help="of each answer (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=default_threads(), help="of each node (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    add_options(parser, "slow-links")
    arguments = parser.parse_args()
    if arguments.tokens < 2 or arguments.repeats < 1 or arguments.delay_ms < 0:
        parser.error("--tokens is at least 2, --repeats 1, --delay-ms 0")
    console = environment.begin(width=160)
    found, busy = asyncio.run(run(arguments, console))
    print_table(found, arguments, busy, console)
    publish_drawn(arguments.name, document(found, arguments, busy), console, line=arguments.json)


if __name__ == "__main__":
    main()
