"""What `meshnet chat` says while nothing comes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from meshnet_cli import chat, chat_progress, chat_silence
from meshnet_cli.chat_silence import reason_of, watched
from meshnet_cli.chat_stream import Gateway
from meshnet_cli.complaint import CommandFailedError
from scripted_gateway import ScriptedGateway, serving


def node(name: str, layers: str, *, answers: bool = True) -> dict[str, Any]:
    return {"node": name, "answers": answers, "layers": [{"model": "tiny", "fingerprint": "f", "layers": layers}]}


def status(*nodes: dict[str, Any], missing: list[str], **gateway: int) -> dict[str, Any]:
    model = {"name": "tiny", "fingerprint": "f", "num_layers": 4, "missing_layers": missing}
    return {"models": [model], "nodes": list(nodes), "gateway": gateway}


DEAD = status(node("a", "0-1"), node("b", "2-3", answers=False), missing=[])


@pytest.mark.parametrize(
    ("document", "told"),
    [
        (DEAD, "nobody who answers holds layers 2-3; to go on: meshnet node MODEL --layers 2-3"),
        (
            status(node("a", "1-3"), missing=["0"]),
            "nobody who answers holds layers 0; to go on: meshnet node MODEL --layers 0",
        ),
        (
            status(node("a", "0-3"), missing=[], waiting_for_room=2),
            "the nodes have no room for more sessions just now; answers that wait for it: 2",
        ),
        (status(node("a", "0-3"), missing=[], waiting_for_room=0), None),
        ({}, None),
    ],
)
def test_the_reason_is_read_from_the_status(document: dict[str, Any], told: str | None) -> None:
    assert reason_of(document, "tiny") == told


def test_the_gaps_of_other_models_are_no_reason() -> None:
    assert reason_of(DEAD, "other") is None


async def test_each_long_silence_is_told_once_and_no_event_is_lost() -> None:
    told: list[int] = []
    came: list[int] = []
    long_enough, said = asyncio.Event(), asyncio.Event()

    async def events() -> AsyncGenerator[int]:
        yield 1
        long_enough.set()
        await said.wait()
        yield 2
        yield 3

    async def sleep(_: float) -> None:
        await long_enough.wait()
        long_enough.clear()

    async def tell() -> None:
        told.append(len(came))
        said.set()

    async for event in watched(events(), tell, sleep):
        came.append(event)  # noqa: PERF401 - `tell` looks at it meanwhile
    assert (came, told) == ([1, 2, 3], [1])


async def spoken(partner: chat.Partner, pieces: list[str]) -> None:
    await chat._answer(partner, [{"role": "user", "content": "hi"}], pieces)


async def as_json(partner: chat.Partner, _: list[str]) -> None:
    await chat._document(partner, [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("ask", [spoken, as_json])
async def test_chat_says_at_once_which_layers_lack(
    ask: Callable[[chat.Partner, list[str]], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(chat_silence, "SILENCE_S", 0)
    with serving(ScriptedGateway([[None]], status=DEAD)) as gateway:
        answer = asyncio.ensure_future(ask(chat.Partner(Gateway(gateway.url), "tiny", 0), []))
        out, err = "", ""
        async with asyncio.timeout(120):
            while "nothing yet: nobody who answers holds layers 2-3" not in err:
                await asyncio.sleep(0.02)
                captured = capsys.readouterr()
                out, err = out + captured.out, err + captured.err
        answer.cancel()
        with suppress(asyncio.CancelledError):
            await answer
    assert out == ""


async def test_the_line_that_tells_how_far_it_is_goes_when_the_answer_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    failing = ScriptedGateway([["Hel", RuntimeError("boom")]])
    with serving(failing) as gateway, pytest.raises(CommandFailedError, match="boom"):
        await as_json(chat.Partner(Gateway(gateway.url), "tiny", 0), [])
    assert capsys.readouterr() == ("", "\r\x1b[2Kanswering: 3 characters\r\x1b[2K")


async def test_a_status_that_is_not_told_ends_nothing() -> None:
    with serving(ScriptedGateway([], status={"models": 3})) as gateway:
        async with Gateway(gateway.url) as client:
            assert await chat_progress.reason_for(client, "tiny") is None
