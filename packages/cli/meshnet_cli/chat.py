"""`meshnet chat`: talk to a gateway from a terminal. Ctrl-C stops the answer, not the program."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from meshnet_cli import options
from meshnet_core.chat_sampling import CHAT_TEMPERATURE, CHAT_TOP_P
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
    """Print a whole answer, with what the gateway reports of it, as JSON."""
    from meshnet_cli.chat_stream import Ended, Text, Thought

    answer, reasoning = "", ""
    sampling = {"temperature": partner.temperature, "top_p": CHAT_TOP_P}
    async with partner.gateway as gateway:
        async for event in gateway.chat(partner.model, messages, **sampling):
            match event:
                case Thought(text):
                    reasoning += text
                case Text(text):
                    answer += text
                case Ended(finish_reason, usage, report):
                    told = {"finish_reason": finish_reason, "usage": usage, "meshnet": report}
                    document = {"model": partner.model, "answer": answer, "reasoning": reasoning or None, **told}
                    print(json.dumps(document, indent=2, ensure_ascii=False))


async def _answer(partner: Partner, messages: list[Message], pieces: list[str]) -> None:
    """Show an answer as it comes; ``pieces`` gets what has come, also if it is stopped."""
    from meshnet_cli.chat_silence import watched
    from meshnet_cli.chat_stream import Ended, Prefill, Text, Thought

    shown, thinking = _PrefillLine(), False
    sampling = {"temperature": partner.temperature, "top_p": CHAT_TOP_P}
    async with partner.gateway as gateway:

        async def tell_why() -> None:
            if (reason := await _reason(gateway, partner.model)) is not None:
                shown.clear()
                sys.stderr.write("\n" * (bool(pieces) or thinking) + f"nothing yet: {reason}\n")
                sys.stderr.flush()

        async for event in watched(gateway.chat(partner.model, messages, **sampling), tell_why):
            match event:
                case Prefill(done, total):
                    shown.update(done, total)
                case Thought(text):
                    shown.clear()
                    thinking = True
                    sys.stderr.write(text)
                    sys.stderr.flush()
                case Text(text):
                    shown.clear()
                    if thinking:
                        thinking = False
                        sys.stderr.write("\n\n")
                        sys.stderr.flush()
                    pieces.append(text)
                    sys.stdout.write(text)
                    sys.stdout.flush()
                case Ended():
                    shown.clear()
                    sys.stdout.write("\n")
                    sys.stdout.flush()
                    sys.stderr.write(f"[{speed_line(event)}]\n")


async def _reason(gateway: Gateway, model: str) -> str | None:
    """Why nothing comes; None where nobody knows."""
    from meshnet_cli.chat_silence import reason_of

    try:
        return reason_of(await gateway.get("/meshnet/status"), model)
    except (
        MeshnetError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ):  # a help, and no reason to end what may still come
        return None


class _PrefillLine:
    """How far a long prompt is, on one line of a terminal that goes when the answer comes."""

    def __init__(self) -> None:
        self._wanted = sys.stderr.isatty()
        self._there = False

    def update(self, done: int, total: int) -> None:
        if self._wanted and done < total:
            sys.stderr.write(f"\r\x1b[2Kreading the prompt: {done} of {total} tokens")
            sys.stderr.flush()
            self._there = True

    def clear(self) -> None:
        if self._there:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
            self._there = False


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
