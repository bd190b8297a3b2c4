"""What is left of a lean stream when its connection breaks, hangs or says what is none: before a peer under control."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import Awaitable
from dataclasses import replace

import pytest

from golden_frames import DECODE
from meshnet_core import stream_codec, stream_connection
from meshnet_core.clock import SystemClock
from meshnet_core.errors import DeadlineError, HopFailedError, HopUnreachableError
from meshnet_core.frames import Frame, FrameReply
from meshnet_core.stream_codec import STREAM
from meshnet_core.stream_transport import StreamTransport, transport_for
from meshnet_core.wire_form import WireForm
from served_stream import (
    MAX_BODY,
    PATIENCE_S,
    Node,
    at,
    scripted,
    serving,
)


async def refused(call: Awaitable[object]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - told apart by who asks
        await call
    return caught.value


@pytest.mark.parametrize("served", [0, 1], ids=["on a new connection", "on one that had served"])
async def test_a_connection_that_breaks_is_tried_once_more_only_where_it_had_served(
    transport: StreamTransport, served: int
) -> None:
    seen: list[tuple[int, int]] = []

    def answer(connection: int, frame: Frame) -> bytes | None:
        seen.append((connection, frame.position))
        return b"" if frame.position < served or connection == 1 else None

    async with scripted(answer) as url:
        for position in range(served):
            await transport.forward(url, at(position))
        (outcome,) = await asyncio.gather(transport.forward(url, at(served)), return_exceptions=True)
    if served:
        assert outcome == FrameReply(2)
        assert seen == [(0, 0), (0, 1), (1, 1)]
    else:
        assert isinstance(outcome, HopUnreachableError)
        assert outcome.hop_index == 1
        assert seen == [(0, 0)]


async def test_all_frames_in_flight_on_a_connection_that_breaks_are_told(transport: StreamTransport) -> None:
    async with scripted(
        lambda _, frame: None if frame.position == 9 else stream_codec.encode_reply(FrameReply(1), 1)
    ) as url:
        calls = [transport.forward(url, at(position)) for position in (2, 9)]
        outcome = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(one, HopUnreachableError | FrameReply) for one in outcome)
    assert any(isinstance(one, HopUnreachableError) for one in outcome)


@pytest.mark.parametrize(
    "said",
    [
        b"\x00\x00\x00\x00",
        struct.pack("<I", 2**31) + bytes(100),
        stream_codec.encode_frame(DECODE.frame, 1, 1),
        stream_codec.encode_reply(FrameReply(1), 99),
    ],
    ids=["a length that none has", "too long", "a frame", "an answer to what nobody asked"],
)
async def test_an_unreadable_answer_is_a_failed_hop(transport: StreamTransport, said: bytes) -> None:
    async with scripted(lambda *_: said) as url:
        error = await refused(transport.forward(url, DECODE.frame))
    assert isinstance(error, HopFailedError)
    assert error.hop_index == 1


async def test_a_hop_that_hangs_is_named_and_its_connection_left(transport: StreamTransport) -> None:
    used: list[int] = []

    def answer(connection: int, frame: Frame) -> bytes:
        used.append(connection)
        return b"" if frame.position else stream_codec.encode_reply(FrameReply(1), 1)[:6]  # and never the rest

    async with scripted(answer) as url:
        assert (await transport.forward(url, at(4))).position == 5  # the connection stands
        error = await refused(transport.forward(url, replace(at(0), deadline_ms=300)))
        assert isinstance(error, DeadlineError)
        assert error.hop_index == 1
        assert (await transport.forward(url, at(5))).position == 6
    assert used == [0, 0, 1]


async def test_a_hop_that_hangs_in_mid_frame_is_not_sent_the_rest_of_it_when_it_wakes(
    transport: StreamTransport,
) -> None:
    """What it does not read would be kept, with its connection, for as long as it hangs."""
    begun, awake, read = asyncio.Event(), asyncio.Event(), asyncio.Queue[int]()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 101 Go\r\nUpgrade: {STREAM}\r\n\r\n".encode())
        count = 0
        with contextlib.suppress(ConnectionError):
            count += len(await reader.read(10))
            begun.set()
            await awake.wait()
            while data := await reader.read(2**20):
                count += len(data)
        read.put_nowait(count)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    big = replace(DECODE.frame, body=bytes(64 * 2**20), deadline_ms=500)
    while not begun.is_set():  # where the machine stalls, the time may be up before a frame is on its way
        error = await refused(transport.forward(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", big))
        assert isinstance(error, DeadlineError)
    awake.set()
    async with asyncio.timeout(PATIENCE_S):
        assert await read.get() < len(big.body)
    server.close()


async def test_an_upgrade_that_is_never_answered_holds_up_one_frame_and_the_next_ones_are_posts(
    transport: StreamTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a proxy that knows no upgrades."""
    monkeypatch.setattr(stream_connection, "UPGRADE_S", 0.2)
    asked: list[str] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            asked.append((await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1].decode())
            if asked[-1] == "/hop/stream":
                await reader.read()
            else:
                body = json.dumps(FrameReply(262).to_wire()).encode()
                head = f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for _ in range(2):
        assert await transport.forward(url, replace(DECODE.frame, deadline_ms=1000 * PATIENCE_S)) == FrameReply(262)
    assert asked == ["/hop/stream", "/hop/forward", "/hop/forward"]
    server.close()


async def test_a_frame_that_cannot_be_told_is_not_waited_for(node: Node, transport: StreamTransport) -> None:
    assert (await transport.forward(node.url, at(4))).position == 5  # the connection stands
    with pytest.raises(struct.error):
        await transport.forward(node.url, at(2**40))
    (stream,) = transport._streams.values()
    assert stream.pending == 0
    assert (await transport.forward(node.url, at(5))).position == 6


async def test_whoever_waits_for_a_connection_is_told_that_the_transport_closes() -> None:
    asked = asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    transport = transport_for(WireForm.STREAM, SystemClock())
    frame = replace(DECODE.frame, deadline_ms=1000 * PATIENCE_S)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    call = asyncio.create_task(transport.forward(url, frame))
    await asked.wait()
    await transport.close()
    assert isinstance(await refused(call), HopUnreachableError)
    server.close()


async def test_what_a_connection_still_owes_that_another_replaced_ends_with_the_transport(node: Node) -> None:
    transport = transport_for(WireForm.STREAM, SystemClock())
    node.endpoint.held = {1: asyncio.Event()}
    slow = asyncio.create_task(transport.forward(node.url, replace(at(1), deadline_ms=1000 * PATIENCE_S)))
    await node.endpoint.seen(1)
    await refused(transport.forward(node.url, replace(DECODE.frame, body=bytes(MAX_BODY + 1))))
    assert (await transport.forward(node.url, at(2))).position == 3  # on another one
    await transport.close()
    assert isinstance(await refused(slow), HopUnreachableError)
    node.endpoint.held[1].set()


async def test_a_frame_whose_caller_left_is_answered_to_nobody(node: Node, transport: StreamTransport) -> None:
    node.endpoint.held = {1: asyncio.Event()}
    call = asyncio.create_task(transport.forward(node.url, at(1)))
    await node.endpoint.seen(1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    node.endpoint.held[1].set()
    assert (await transport.forward(node.url, at(2))).position == 3
    assert node.count("meshnet_node_calls_total", call="/hop/stream", result="ok") == 1  # on the same connection


async def test_a_stream_ends_with_its_node_once_what_it_read_is_answered(transport: StreamTransport) -> None:
    async with contextlib.AsyncExitStack() as closing:
        node = await closing.enter_async_context(serving())
        node.endpoint.held = {1: asyncio.Event()}
        call = asyncio.create_task(transport.forward(node.url, at(1)))
        await node.endpoint.seen(1)
        stopping = asyncio.create_task(closing.aclose())
        await asyncio.sleep(0)
        node.endpoint.held[1].set()
        assert (await call).position == 2
        async with asyncio.timeout(PATIENCE_S):
            await stopping
    assert isinstance(await refused(transport.forward(node.url, at(2))), HopUnreachableError)
