"""`meshnet chat`: talk to a gateway from a terminal. Ctrl-C stops the answer, not the program."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from meshnet_cli import options
from meshnet_core.chat_sampling import CHAT_TEMPERATURE
from meshnet_core.errors import InvalidInputError, MeshnetError, ModelNotFoundError

if TYPE_CHECKING:
    from meshnet_cli.chat_stream import Ended, Gateway, GatewayUnreachableError

Message = dict[str, str]


@dataclass(frozen=True)
class Partner:
    """Whom a conversation is with."""

    gateway: Gateway
    model: str
    temperature: float


def chat(
    url: options.GatewayUrl = None,
    message: Annotated[
        str | None, typer.Option("--message", "-m", metavar="TEXT", help="Say this, show the answer and leave.")
    ] = None,
    model: options.ServedModel = None,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, max=2, help="0 always says the likeliest.")
    ] = CHAT_TEMPERATURE,
    api_key: options.ClientKey = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --message: print one JSON document in place of the answer.")
    ] = False,
) -> None:
    """Chat with the model that a mesh serves."""
    from meshnet_cli.chat_stream import Gateway, GatewayUnreachableError

    if as_json and message is None:
        raise InvalidInputError("--json is for one question; give it with --message")
    if message is not None and not is_unicode(message):
        raise InvalidInputError("--message is not in this terminal's encoding, which should be UTF-8; see `locale`")
    gateway = Gateway(url or options.DEFAULT_API_URL, api_key)
    try:
        served = asyncio.run(model_of(gateway, model))
    except GatewayUnreachableError as error:
        if url is None:
            _tell_of_others(error)
        raise
    partner = Partner(gateway, served, temperature)
    if message is not None:
        turn = [{"role": "user", "content": message}]
        asyncio.run(_document(partner, turn) if as_json else _answer(partner, turn, []))
        return
    _converse(partner)


def is_unicode(text: str) -> bool:
    """Whether what was typed is characters alone, without bytes that Python could not read."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _tell_of_others(error: GatewayUnreachableError) -> None:
    """Where none was named: those on the local network. Only a person can tell whether one of them is to be trusted
    with what is said, and with an API key."""
    from meshnet_cli import mdns

    if found := asyncio.run(mdns.find_apis()):
        named = " or ".join(f"--url {one}" for one in found)
        error.message += f". On the local network there is one: if it is yours, meshnet chat {named}"


async def model_of(gateway: Gateway, wanted: str | None) -> str:
    """The model to talk to."""
    from meshnet_cli.complaint import CommandFailedError

    async with gateway:
        models = await gateway.models()
    if not models:
        at = "" if gateway.url == options.DEFAULT_API_URL else f" --url {gateway.url}"
        raise CommandFailedError(
            f"the mesh at {gateway.url} serves no complete model yet; `meshnet status{at}` shows what lacks"
        )
    if wanted is not None and wanted not in models:
        raise ModelNotFoundError(f"the mesh serves no model {wanted!r}; it serves {', '.join(models)}")
    return wanted or models[0]


def _converse(partner: Partner) -> None:
    """Turns until the end of input. An answer that was stopped stays in the conversation as far as it came."""
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` its line editing
    say = sys.stderr.write
    say(f"Talking to {partner.model}. Ctrl-C stops an answer; Ctrl-D or /exit leaves.\n")
    history: list[Message] = []
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            say("\n")
            return
        except KeyboardInterrupt:
            say("\n")
            continue
        if text == "/exit":
            return
        if not text:
            continue
        if not is_unicode(text):
            say("meshnet: that is not in this terminal's encoding, which should be UTF-8; see `locale`\n")
            continue
        turn = [*history, {"role": "user", "content": text}]
        pieces: list[str] = []
        try:
            asyncio.run(_answer(partner, turn, pieces))
        except KeyboardInterrupt:
            say("\n[stopped]\n")
        except MeshnetError as error:
            say(f"\nmeshnet: {error.message}\n")
            continue  # the question is not kept: it can be asked again
        history = [*turn, {"role": "assistant", "content": "".join(pieces)}]


async def _document(partner: Partner, messages: list[Message]) -> None:
    """Print a whole answer, with what the gateway reports of it, as JSON; what is told meanwhile goes to stderr."""
    from meshnet_cli.chat_progress import ProgressLine, answer_events
    from meshnet_cli.chat_stream import Ended, Text, Thought

    answer, reasoning, line = "", "", ProgressLine()
    async with aclosing(answer_events(partner, messages, line)) as events:
        async for event in events:
            match event:
                case Thought(text):
                    reasoning += text
                    line.show(f"thinking: {len(reasoning)} characters")
                case Text(text):
                    answer += text
                    line.show(f"answering: {len(answer)} characters")
                case Ended(finish_reason, usage, report):
                    line.clear()
                    told = {"finish_reason": finish_reason, "usage": usage, "meshnet": report}
                    document = {"model": partner.model, "answer": answer, "reasoning": reasoning or None, **told}
                    print(json.dumps(document, indent=2, ensure_ascii=False))
                    sys.stderr.write(f"[{speed_line(event)}]\n")


async def _answer(partner: Partner, messages: list[Message], pieces: list[str]) -> None:
    """Show an answer as it comes; ``pieces`` gets what has come, also if it is stopped."""
    from meshnet_cli.chat_progress import ProgressLine, answer_events
    from meshnet_cli.chat_stream import Ended, Text, Thought

    line, thinking = ProgressLine(), False
    async with aclosing(answer_events(partner, messages, line, lambda: bool(pieces) or thinking)) as events:
        async for event in events:
            line.clear()
            match event:
                case Thought(text):
                    thinking = True
                    sys.stderr.write(text)
                    sys.stderr.flush()
                case Text(text):
                    if thinking:
                        thinking = False
                        sys.stderr.write("\n\n")
                        sys.stderr.flush()
                    pieces.append(text)
                    sys.stdout.write(text)
                    sys.stdout.flush()
                case Ended():
                    sys.stdout.write("\n")
                    sys.stdout.flush()
                    sys.stderr.write(f"[{speed_line(event)}]\n")


def speed_line(ended: Ended) -> str:
    """Tokens and speed in a few words, of what the gateway told."""
    report = ended.report
    parts = [f"{report.get('completion_tokens', ended.usage.get('completion_tokens', '?'))} tokens"]
    if "tokens_per_s" in report:
        parts.append(f"{report['tokens_per_s']:.1f} tokens/s")
    if "ttft_s" in report:
        parts.append(f"first after {report['ttft_s']:.2f} s")
    if ended.finish_reason == "length":
        parts.append("cut at the limit of tokens")
    return ", ".join(parts)
