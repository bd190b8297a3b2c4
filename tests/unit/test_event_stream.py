"""How a stream of server-sent events ends when the server itself stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from meshnet_gateway.answer_shapes import CompletionShape
from meshnet_gateway.event_stream import EventStream
from meshnet_gateway.jobs import farewell
from meshnet_gateway.text_model import TextModel
from tiny_tokenizers import byte_level_files

FAREWELL = farewell(CompletionShape(TextModel.from_files("tiny", "f" * 64, byte_level_files())))


class Connection:
    """The server's side of one request, whose client stays."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.first_body = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body":
            self.first_body.set()


@pytest.mark.parametrize("spoken", [True, False])
async def test_a_stream_that_the_server_cuts_says_so(spoken: bool) -> None:
    closed = asyncio.Event()

    async def events() -> AsyncGenerator[bytes]:
        try:
            if spoken:
                yield b"data: 1\n\n"
            await asyncio.Event().wait()
        finally:
            closed.set()

    connection = Connection()
    stream = EventStream(events(), {}, FAREWELL)
    serving = asyncio.create_task(stream({"type": "http"}, connection.receive, connection.send))  # type: ignore[arg-type]
    if spoken:
        await connection.first_body.wait()
    else:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    bodies = [message for message in connection.sent if message["type"] == "http.response.body"]
    if not spoken:
        assert bodies == []  # nothing was promised; the server answers with a status of its own
        return
    assert closed.is_set()
    assert bodies[-1] == {"type": "http.response.body", "body": FAREWELL, "more_body": False}
    assert b'"gateway_stopping"' in FAREWELL
    assert FAREWELL.endswith(b"data: [DONE]\n\n")
