"""Lean streams that are idle are closed, and which are not."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from meshnet_core.frames import PROTOCOLS
from meshnet_core.stream_codec import STREAM
from meshnet_node import frame_stream
from served_stream import (
    GOOD,
    MAX_BODY,
    PATIENCE_S,
    Node,
    raw,
    serving,
)


async def test_an_idle_stream_is_closed_by_the_node_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshnet_node.torch_server.KEEPALIVE_S", 0.2)
    async with serving() as node, raw(node.port) as connection:
        assert await connection.answer() is None


class Wire(asyncio.Transport):
    """What a stream writes to; one with ``unsent`` bytes does not close, it has to be cut."""

    def __init__(self, unsent: int = 0) -> None:
        super().__init__()
        self.unsent = unsent
        self.cut, self.closing = asyncio.Event(), False
        self.written = asyncio.Event()

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.set()

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.cut.set()

    def pause_reading(self) -> None:
        return None


def stream_on(wire: Wire) -> frame_stream.FrameStream:
    """One that is idle after a moment."""
    stream = frame_stream.FrameStream(
        lambda *_: asyncio.sleep(0, b"an answer"),
        lambda *_: None,
        protocols=PROTOCOLS,
        max_body=MAX_BODY,
        body_timeout_s=PATIENCE_S,
        idle_s=0.05,
        on_lost=lambda _: None,
    )
    stream.connection_made(wire)
    return stream


async def test_a_stream_on_which_a_message_is_coming_in_is_not_idle() -> None:
    wire = Wire()
    stream = stream_on(wire)
    stream.data_received(GOOD[:-1])
    await asyncio.sleep(0.3)
    assert not wire.closing
    stream.data_received(GOOD[-1:])
    async with asyncio.timeout(PATIENCE_S):
        await wire.written.wait()
    stream.connection_lost(None)


async def test_an_idle_stream_whose_caller_does_not_read_is_not_waited_for() -> None:
    wire = Wire(unsent=1)
    stream = stream_on(wire)
    stream.pause_writing()
    async with asyncio.timeout(PATIENCE_S):
        await wire.cut.wait()
    stream.connection_lost(None)


async def test_no_path_but_the_streams_is_upgraded(node: Node) -> None:
    async with aiohttp.ClientSession(node.url) as session:
        headers = {"Connection": "Upgrade", "Upgrade": STREAM}
        async with session.get("/hop/probe", headers=headers) as response:
            assert response.status == 500  # this endpoint knows frames alone; what matters is that it is HTTP
