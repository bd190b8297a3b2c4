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
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshnet_cli import complaint, options
from meshnet_cli.chat import Partner, model_of

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
    """

    prompt_tokens: int | None
    tokens: int | None
    first_token_s: float
    total_s: float
    tokens_per_s: float | None
    first_50_tokens_per_s: float | None
    last_50_tokens_per_s: float | None
    route: tuple[str, ...]


def bench(
    url: options.GatewayUrl = None,
    model: options.ServedModel = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, metavar="N", help="Most tokens of each answer.")] = 200,
    repeats: Annotated[int, typer.Option("--repeats", min=1, metavar="N", help="Answers, one after the other.")] = 3,
    prompt: Annotated[
        int, typer.Option("--prompt", min=0, metavar="N", help="Words by which the prompt is made longer.")
    ] = 0,
    as_json: options.Json = False,
    api_key: options.ClientKey = None,
) -> None:
    """Measure a running mesh: time to the first token, and tokens per second at an answer's beginning and end."""
    from meshnet_cli.chat_stream import Gateway

    gateway = Gateway(url or options.DEFAULT_API_URL, api_key)
    partner = Partner(gateway, asyncio.run(model_of(gateway, model)), temperature=0)
    runs = []
    for index in range(repeats):
        text = f"{secrets.token_hex(4)}: {PROMPT}{WORD * prompt}"
        runs.append(asyncio.run(measure(partner.gateway, partner.model, text, tokens)))
        complaint.say(f"answer {index + 1} of {repeats}: {line(runs[-1])}")
    if as_json:
        named = {"url": gateway.url, "model": partner.model, "median": medians(runs)}
        print(json.dumps({**named, "runs": [asdict(run) for run in runs]}, indent=2))
        return
    median = medians(runs)
    print(f"{partner.model} over {' -> '.join(runs[-1].route) or 'a route that is not told'}, median of {repeats}")
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
    gateway: Gateway, model: str, prompt: str, tokens: int, clock: Callable[[], float] = time.perf_counter
) -> BenchRun:
    """Ask once, greedily.

    Raises:
        CommandFailedError: the gateway is not reached, or the answer fails.
    """
    from meshnet_cli.chat_stream import Ended, Text, Thought

    began, first = clock(), None
    messages = [{"role": "user", "content": prompt}]
    async with gateway:
        async for event in gateway.chat(model, messages, temperature=0, max_tokens=tokens):
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
