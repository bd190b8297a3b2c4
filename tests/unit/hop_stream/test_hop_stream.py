"""The lean stream over real sockets: how it begins, many frames at once, and what is refused. What both forms have in
common is in `hop_server` and `trust`."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from dataclasses import replace

import pytest

from free_ports import free_port
from golden_frames import DECODE, PREFILL
from meshnet_core import stream_codec
from meshnet_core.clock import ManualClock, SystemClock
from meshnet_core.doorkeeper import Doorkeeper
from meshnet_core.errors import RateLimitedError
from meshnet_core.frames import Frame, FrameReply
from meshnet_core.http_transport import HttpTransport
from meshnet_core.stream_codec import CONNECTION, STREAM
from meshnet_core.stream_transport import StreamTransport, transport_for
from meshnet_core.wire_form import WireForm
from meshnet_node import frame_stream
from served_stream import (
    BODY_TIMEOUT_S,
    BOOT,
    GOOD,
    MAX_BODY,
    UPGRADE,
    Node,
    at,
    raw,
    scripted,
    serving,
)

# -- how it begins ----------------------------------------------------------------------------------------------------


async def test_it_begins_as_an_http_upgrade(node: Node) -> None:
    async with raw(node.port, upgraded=False) as connection:
        connection.writer.write(UPGRADE)
        head = await connection.head()
        assert head.startswith("HTTP/1.1 101 Switching Protocols\r\n")
        assert f"\r\nUpgrade: {STREAM}\r\n" in head
        assert f"\r\nX-Meshnet-Boot: {BOOT}\r\n" in head
        connection.writer.write(bytes.fromhex(PREFILL.stream_frame))
        assert await connection.answer() == (7, FrameReply(261))
    assert node.endpoint.frames == [PREFILL.frame]


@pytest.mark.parametrize(
    ("request_bytes", "status", "reason"),
    [
        (b"GET /hop/stream HTTP/1.1\r\nHost: x\r\n\r\n", 426, f"Upgrade: {STREAM}, not 'none'"),
        (UPGRADE.replace(b"hop/1", b"hop/2"), 426, "not 'meshnet-hop/2'"),
        (UPGRADE.replace(b"Connection: Upgrade", b"Connection: close"), 426, "needs Connection: Upgrade"),
        (UPGRADE.replace(b"\r\n\r\n", b"\r\nX-Meshnet-Protocol: 9\r\n\r\n"), 426, "this node speaks 1"),
        (UPGRADE.replace(b"\r\n\r\n", b"\r\nX-Meshnet-Epoch: 9\r\n\r\n"), 400, "must be there once"),
        (UPGRADE.replace(b"\r\n\r\n", b"\r\nContent-Length: 2\r\n\r\nxx"), 400, "an upgrade has no body"),
        (UPGRADE.replace(b"/stream", b"/stream?session=x"), 400, "takes none"),
        (UPGRADE.replace(b"GET", b"POST"), 405, "takes GET, not POST"),
    ],
)
async def test_what_is_no_upgrade_is_refused_as_http_and_the_next_one_works(
    node: Node, transport: StreamTransport, request_bytes: bytes, status: int, reason: str
) -> None:
    async with raw(node.port, upgraded=False) as connection:
        connection.writer.write(request_bytes)
        head = await connection.head()
        length = next(int(line[16:]) for line in head.split("\r\n") if line.startswith("Content-Length: "))
        said = json.loads(await connection.reader.readexactly(length))["error"]["message"]
    assert int(head.split()[1]) == status
    assert reason in said
    assert (await transport.forward(node.url, DECODE.frame)).boot == BOOT
    assert node.count("meshnet_node_frames_total", form="stream") == 1


async def test_who_asks_for_too_many_streams_is_told_when_to_come_again() -> None:
    doorkeeper = Doorkeeper(ManualClock(), per_s=0.001, burst=1)
    async with serving(doorkeeper=doorkeeper) as node:
        async with raw(node.port):
            pass
        async with raw(node.port, upgraded=False) as connection:
            connection.writer.write(UPGRADE)
            head = await connection.head()
    assert head.startswith("HTTP/1.1 429 ")
    assert "\r\nRetry-After: " in head


async def test_who_sends_too_many_frames_is_told_so_and_may_send_more_later() -> None:
    clock = ManualClock()
    async with serving(doorkeeper=Doorkeeper(clock, per_s=1, burst=2)) as node, raw(node.port) as connection:
        for _ in range(2):
            connection.writer.write(bytes.fromhex(PREFILL.stream_frame))
        answers = [await connection.answer(), await connection.answer()]
        assert (7, FrameReply(261)) in answers
        (told,) = (answer[1] for answer in answers if answer is not None and isinstance(answer[1], dict))
        assert told["code"] == RateLimitedError.code
        clock.advance(5)
        connection.writer.write(bytes.fromhex(PREFILL.stream_frame))
        assert await connection.answer() == (7, FrameReply(261))


# -- hops that speak none ---------------------------------------------------------------------------------------------


async def test_a_hop_that_speaks_no_stream_gets_posts_and_a_stream_once_it_does() -> None:
    clock, free = ManualClock(), free_port()
    transport = StreamTransport(HttpTransport(clock), clock)
    async with serving(streams=False, port=free) as node:
        for position in (261, 262):
            assert (await transport.forward(node.url, at(position))).position == position + 1
        assert node.count("meshnet_node_frames_total", form="http") == 2
        assert node.count("meshnet_node_calls_total", call="unknown", result="invalid_input") == 1  # asked once
    async with serving(port=free) as node:
        await transport.forward(node.url, at(263))
        assert node.count("meshnet_node_frames_total", form="http") == 1
        clock.advance(61)
        await transport.forward(node.url, at(264))
        assert node.count("meshnet_node_frames_total", form="stream") == 1
        await transport.close()


async def test_frames_as_posts_still_work_where_streams_are_taken(node: Node) -> None:
    transport = transport_for(WireForm.HTTP, SystemClock())
    assert await transport.forward(node.url, DECODE.frame) == FrameReply(262)
    assert node.count("meshnet_node_frames_total", form="http") == 1
    await transport.close()


# -- many at once -----------------------------------------------------------------------------------------------------


async def test_frames_share_a_connection_and_are_answered_as_they_are_done(
    node: Node, transport: StreamTransport
) -> None:
    node.endpoint.held = {1: asyncio.Event()}
    slow = asyncio.create_task(transport.forward(node.url, at(1)))
    await node.endpoint.seen(1)
    quick = await asyncio.gather(*(transport.forward(node.url, at(position)) for position in range(2, 60)))
    assert [reply.position for reply in quick] == list(range(3, 61))
    assert not slow.done()
    node.endpoint.held[1].set()
    assert (await slow).position == 2
    assert node.count("meshnet_node_calls_total", call="/hop/forward", result="ok") == 59
    assert node.count("meshnet_node_call_seconds_count", call="/hop/forward") == 59


async def test_more_frames_than_are_read_at_once_are_all_answered(
    node: Node, transport: StreamTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_stream, "MAX_IN_FLIGHT", 3)
    node.endpoint.held = {position: asyncio.Event() for position in range(40)}
    calls = [asyncio.create_task(transport.forward(node.url, at(position))) for position in range(40)]
    for done in range(40):
        await node.endpoint.seen(min(40, done + 3))
        assert len(node.endpoint.frames) <= done + 3
        node.endpoint.held[node.endpoint.frames[done].position].set()
    assert [reply.position for reply in await asyncio.gather(*calls)] == list(range(1, 41))


async def test_bodies_that_are_worked_on_are_bounded_too(node: Node, transport: StreamTransport) -> None:
    node.endpoint.held = {position: asyncio.Event() for position in range(8)}
    big = replace(DECODE.frame, body=bytes(MAX_BODY - 100))
    calls = [asyncio.create_task(transport.forward(node.url, replace(big, position=p))) for p in range(8)]
    for done in range(8):
        await node.endpoint.seen(min(8, done + 2))
        assert len(node.endpoint.frames) <= done + 2
        node.endpoint.held[node.endpoint.frames[done].position].set()
    await asyncio.gather(*calls)


async def test_a_large_frame_has_a_connection_of_its_own() -> None:
    """A decode step does not wait behind a chunk of megabytes on a slow link."""
    connections: list[int] = []

    def answer(connection: int, frame: Frame) -> bytes:
        connections.append(connection)
        return b""

    async with scripted(answer) as url:
        transport = transport_for(WireForm.STREAM, SystemClock())
        for body in (bytes(8), bytes(128 * 1024), bytes(8), bytes(128 * 1024)):
            await transport.forward(url, replace(DECODE.frame, body=body))
        await transport.close()
    assert connections == [0, 1, 0, 1]


# -- refusals ---------------------------------------------------------------------------------------------------------

NOISE = random.Random(20240601).randbytes(4096)
GARBAGE: dict[str, tuple[bytes, str]] = {
    "noise": (NOISE, ""),
    "HTTP": (UPGRADE, ""),
    "a length that none has": (bytes(4), "none is shorter than 8"),
    "a reply": (bytes.fromhex(PREFILL.stream_reply), "no frame"),
    "too long a message": (struct.pack("<I", 2**31) + GOOD[4:], "is too large"),
    "too long a body": (
        stream_codec.encode_frame(replace(PREFILL.frame, body=bytes(MAX_BODY + 1)), 7, 1),
        f"at most {MAX_BODY}",
    ),
    "another protocol": (GOOD[:5] + b"\x02" + GOOD[6:], "this node speaks 1"),
    "a phase unknown": (GOOD[:6] + b"\x09" + GOOD[7:], "from 0 to 3"),
    "a truncated frame": (GOOD[:-3], f"came within {BODY_TIMEOUT_S:g} s"),
    "a byte at a time, too slowly": (GOOD[:1], f"came within {BODY_TIMEOUT_S:g} s"),
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_gets_a_reason_the_connection_ends_and_the_next_frame_works(
    node: Node, transport: StreamTransport, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    data, reason = GARBAGE[name]
    async with raw(node.port) as connection:
        connection.writer.write(data)
        answers = []
        while (answer := await connection.answer()) is not None:
            answers.append(answer)
    request, told = answers[-1]
    assert request == CONNECTION
    assert isinstance(told, dict)
    assert reason in str(told["message"])
    if data[4:5] == GOOD[4:5] and len(data) > 12:
        assert [one[0] for one in answers] == [7, CONNECTION]  # whoever sent it is told
    assert node.endpoint.frames == []
    assert not caplog.records
    refused = node.count("meshnet_node_calls_total", call="/hop/forward", result=str(told["code"]))
    assert refused == 1
    assert await transport.forward(node.url, PREFILL.frame) == FrameReply(261)


async def test_what_was_read_before_the_garbage_is_still_answered(node: Node) -> None:
    node.endpoint.held = {256: asyncio.Event()}
    async with raw(node.port) as connection:
        connection.writer.write(GOOD)
        await node.endpoint.seen(1)
        connection.writer.write(bytes(4) + GOOD)
        answer = await connection.answer()
        assert answer is not None
        assert answer[0] == CONNECTION
        node.endpoint.held[256].set()
        assert await connection.answer() == (7, FrameReply(261))
        assert await connection.answer() is None
    assert len(node.endpoint.frames) == 1  # what came after it was not looked at


async def test_a_too_large_frame_is_refused_by_name_and_others_go_on(node: Node, transport: StreamTransport) -> None:
    node.endpoint.held = {1: asyncio.Event()}
    slow = asyncio.create_task(transport.forward(node.url, at(1)))
    await node.endpoint.seen(1)
    with pytest.raises(Exception, match=f"at most {MAX_BODY}") as caught:
        await transport.forward(node.url, replace(DECODE.frame, body=bytes(MAX_BODY + 1)))
    assert getattr(caught.value, "code", None) == "too_large"
    assert (await transport.forward(node.url, at(2))).position == 3
    node.endpoint.held[1].set()
    assert (await slow).position == 2
