"""`meshnet bench`: how soon and how fast a mesh answers, measured from here through its API.

The time to the first token is of this machine's clock, so that the way to the gateway is in it; speeds are the
gateway's own, which knows where one token ends and the next begins. No prompt begins like another: none is read from
what a node still holds of an earlier one.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshnet_cli import complaint, completion, options
from meshnet_cli.chat import Partner, model_of
from meshnet_core.errors import InvalidInputError, MeshnetError

if TYPE_CHECKING:
    from meshnet_cli.chat_stream import Gateway

PROMPT = "Count upward from one, one number on each line, and do not stop."
WORD = " count"  # one token or two of most vocabularies


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One answer.

    Attributes:
        prompt_tokens, tokens: of the prompt and of the answer.
        first_token_s: seconds from the request to the first piece of the answer, here.
        total_s: to its end, here.
        tokens_per_s, first_50_tokens_per_s, last_50_tokens_per_s: of the whole answer and of its ends, at the gateway;
            None where the answer was too short.
        route: that it took.
        report: the gateway's own, as it came.
    """

    prompt_tokens: int | None
    tokens: int | None
    first_token_s: float
    total_s: float
    tokens_per_s: float | None
    first_50_tokens_per_s: float | None
    last_50_tokens_per_s: float | None
    route: tuple[str, ...]
    report: dict[str, Any] = field(default_factory=dict, repr=False)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "report"}


def bench(
    url: options.GatewayUrl = None,
    model: options.ServedModel = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, metavar="N", help="Most tokens of each answer.")] = 200,
    repeats: Annotated[int, typer.Option("--repeats", min=1, metavar="N", help="Answers, one after the other.")] = 3,
    prompt: Annotated[
        int, typer.Option("--prompt", min=0, metavar="N", help="Words by which the prompt is made longer.")
    ] = 0,
    profile: Annotated[
        bool, typer.Option("--profile", help="Tell where the time of decode steps goes: parts that add up.")
    ] = False,
    step_of: Annotated[
        str | None,
        typer.Option(
            "--step-of",
            metavar="MODEL",
            help="With --profile: load each hop's layers of MODEL here too, and split their step into products, "
            "attention and the rest.",
            autocompletion=completion.complete_model,
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, metavar="N", help="CPU threads of that.", show_default="torch's")
    ] = None,
    as_json: options.Json = False,
    api_key: options.ClientKey = None,
) -> None:
    """Measure a running mesh: time to the first token, and tokens per second at an answer's beginning and end."""
    from meshnet_cli import bench_profile
    from meshnet_cli.chat_stream import Gateway
    from meshnet_cli.steps_told import steps_told

    for missing in ("--step-of" if step_of and not profile else "", "--threads" if threads and not step_of else ""):
        if missing:
            needs = "--profile" if missing == "--step-of" else "--profile --step-of MODEL"
            raise InvalidInputError(f"{missing} means something with {needs} alone; give that too")
    if step_of is not None:
        bench_profile.check_model(step_of)
    gateway = Gateway(url or options.DEFAULT_API_URL, api_key)
    partner = Partner(gateway, asyncio.run(model_of(gateway, model)), temperature=0)
    fields: dict[str, Any] = {"meshnet": {"profile": "on"}} if profile else {}
    runs = []
    for index in range(repeats):
        text = f"{secrets.token_hex(4)}: {PROMPT}{WORD * prompt}"
        runs.append(asyncio.run(measure(partner.gateway, partner.model, text, tokens, **fields)))
        complaint.say(f"answer {index + 1} of {repeats}: {line(runs[-1])}")
    profiled = None
    if profile:
        told = [] if step_of is None else steps_told(runs[-1].report, partner.model, asyncio.run(_status(gateway)))
        profiled = bench_profile.profile_of([run.report for run in runs], step_of, threads, told)
    if as_json:
        named = {"url": gateway.url, "model": partner.model, "median": medians(runs)}
        more = {} if profiled is None else {"profile": profiled.to_json()}
        print(json.dumps({**named, **more, "runs": [run.to_json() for run in runs]}, indent=2))
        return
    _show(partner.model, runs)
    if profiled is not None:
        bench_profile.show(profiled)


async def _status(gateway: Gateway) -> dict[str, Any]:
    """What the gateway tells of the mesh; nothing where it does not: what was measured is told all the same."""
    with suppress(MeshnetError):
        async with gateway:
            return await gateway.get("/meshnet/status")
    return {}


def _show(model: str, runs: list[BenchRun]) -> None:
    median = medians(runs)
    print(f"{model} over {' -> '.join(runs[-1].route) or 'a route that is not told'}, median of {len(runs)}")
    for name, unit in FIGURES.items():
        shown = "not told, the answers are too short" if median[name] is None else f"{median[name]:.3g} {unit}"
        print(f"  {name.replace('_', ' '):<24}{shown}")


FIGURES = {
    "first_token_s": "s",
    "tokens_per_s": "tokens/s",
    "first_50_tokens_per_s": "tokens/s",
    "last_50_tokens_per_s": "tokens/s",
}


async def measure(
    gateway: Gateway,
    model: str,
    prompt: str,
    tokens: int,
    clock: Callable[[], float] = time.perf_counter,
    **fields: Any,
) -> BenchRun:
    """Ask once, greedily, with these other ``fields`` of a request.

    Raises:
        CommandFailedError: the gateway is not reached, or the answer fails.
    """
    from meshnet_cli.chat_stream import Ended, Text, Thought

    began, first = clock(), None
    messages = [{"role": "user", "content": prompt}]
    async with gateway:
        async for event in gateway.chat(model, messages, temperature=0, max_tokens=tokens, **fields):
            match event:
                case Text() | Thought() if first is None:
                    first = clock() - began
                case Ended(_, usage, report):
                    return _run(usage, report, first, clock() - began)
    raise complaint.CommandFailedError("the answer ended without its end being told")


def _run(usage: dict[str, Any], report: dict[str, Any], first: float | None, total: float) -> BenchRun:
    return BenchRun(
        prompt_tokens=usage.get("prompt_tokens", report.get("prompt_tokens")),
        tokens=usage.get("completion_tokens", report.get("completion_tokens")),
        first_token_s=round(total if first is None else first, 4),
        total_s=round(total, 4),
        tokens_per_s=report.get("tokens_per_s"),
        first_50_tokens_per_s=report.get("tokens_per_s_first_50"),
        last_50_tokens_per_s=report.get("tokens_per_s_last_50"),
        route=tuple(f"{hop['node']}[{hop['layers']}]" for hop in report.get("route", ())),
        report=report,
    )


def medians(runs: list[BenchRun]) -> dict[str, float | None]:
    """Of each of `FIGURES`; None where no run has it."""
    found: dict[str, float | None] = {}
    for name in FIGURES:
        known = [value for run in runs if (value := getattr(run, name)) is not None]
        found[name] = round(statistics.median(known), 4) if known else None
    return found


def line(run: BenchRun) -> str:
    """One run in a few words."""
    speed = "" if run.tokens_per_s is None else f", {run.tokens_per_s:.1f} tokens/s"
    return f"{run.tokens} tokens, first after {run.first_token_s:.2f} s{speed}"
