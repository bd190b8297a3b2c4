"""The lean stream over real sockets: how it begins, many frames at once, what is refused, and what is left of it when a
connection breaks. What both forms have in common is in `test_hop_server` and `trust`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest

from free_ports import free_port
from golden_frames import DECODE, PREFILL
from meshnet_cli.serving import listen, port_of, serving_aiohttp
from meshnet_core import stream_codec, stream_connection
from meshnet_core.clock import ManualClock, SystemClock
from meshnet_core.doorkeeper import Doorkeeper
from meshnet_core.errors import DeadlineError, HopFailedError, HopUnreachableError, RateLimitedError
from meshnet_core.frames import PROTOCOLS, Frame, FrameReply
from meshnet_core.http_transport import HttpTransport
from meshnet_core.stream_codec import CONNECTION, STREAM, MessageBuffer
from meshnet_core.stream_transport import StreamTransport, transport_for
from meshnet_core.wire_form import WireForm
from meshnet_node import frame_stream
from meshnet_node.node_metrics import NodeMetrics
from meshnet_node.torch_server import create_app, new_doorkeeper, runner_for

BOOT = "b-0123456789abcdef"
MAX_BODY = 4096
BODY_TIMEOUT_S = 1.5  # two tests sit it out; on a machine that stalls, whole messages must not
UPGRADE = f"GET /hop/stream HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: {STREAM}\r\n\r\n".encode()
PATIENCE_S = 60  # for what comes at once, on a machine that is busy


@dataclass
class Endpoint:
    """Answers frames; those at a position in ``held`` wait for their event."""

    held: dict[int, asyncio.Event] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def forward(self, frame: Frame) -> FrameReply:
        self.frames.append(frame)
        self.arrived.set()
        if frame.position in self.held:
            await self.held[frame.position].wait()
        return FrameReply(frame.position + frame.seq_len)

    async def seen(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.frames) < count:
                self.arrived.clear()
                await self.arrived.wait()


@dataclass
class Node:
    endpoint: Endpoint
    metrics: NodeMetrics
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@contextlib.asynccontextmanager
async def serving(*, streams: bool = True, doorkeeper: Doorkeeper | None = None, port: int = 0) -> AsyncIterator[Node]:
    endpoint, metrics = Endpoint(), NodeMetrics(dict)
    answers: Any = endpoint  # nothing but frames is sent to it
    app = create_app(
        answers,
        boot=BOOT,
        status=dict,
        text_files=lambda _: None,
        max_body=MAX_BODY,
        body_timeout_s=BODY_TIMEOUT_S,
        metrics=metrics,
        doorkeeper=doorkeeper,
        streams=streams,
    )
    sock = listen("127.0.0.1", port)
    async with serving_aiohttp(runner_for(app), sock, None, new_doorkeeper()):
        yield Node(endpoint, metrics, port_of(sock))


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with serving() as node:
        yield node


@pytest.fixture
async def transport() -> AsyncIterator[StreamTransport]:
    transport = transport_for(WireForm.STREAM, SystemClock())
    assert isinstance(transport, StreamTransport)
    yield transport
    await transport.close()


def at(position: int) -> Frame:
    return replace(DECODE.frame, position=position)


# -- how it begins ----------------------------------------------------------------------------------------------------


@dataclass
class Raw:
    """One connection under the test's control."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    messages: MessageBuffer = field(default_factory=lambda: MessageBuffer(2**20))

    async def head(self) -> str:
        return (await self.reader.readuntil(b"\r\n\r\n")).decode()

    async def answer(self) -> tuple[int, FrameReply | dict[str, object]] | None:
        """The next answer, a refusal as what its JSON says; None once the connection is closed."""
        while (message := self.messages.take()) is None:
            if not (data := await self.reader.read(65536)):
                return None
            self.messages.feed(data)
        request, told = stream_codec.decode_answer(message)
        return request, told if isinstance(told, FrameReply) else json.loads(told)["error"]


@contextlib.asynccontextmanager
async def raw(port: int, *, upgraded: bool = True) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    connection = Raw(reader, writer)
    try:
        async with asyncio.timeout(PATIENCE_S):
            if upgraded:
                writer.write(UPGRADE)
                await connection.head()
            yield connection
    finally:
        writer.close()


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

GOOD = bytes.fromhex(PREFILL.stream_frame)
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


# -- a peer under the test's control ----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def scripted(answer: Callable[[int, Frame], bytes | None]) -> AsyncIterator[str]:
    """A peer that speaks the stream; to a frame on connection ``c`` it says ``answer(c, frame)``, or hangs up on None.

    Where that is empty, a reply.
    """
    connections = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connection, messages = connections, MessageBuffer(2**24)
        connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 101 Go\r\nUpgrade: {STREAM}\r\nX-Meshnet-Boot: {BOOT}\r\n\r\n".encode())
            while data := await reader.read(65536):
                messages.feed(data)
                while (message := messages.take()) is not None:
                    request, frame = stream_codec.decode_frame(message)
                    said = answer(connection, frame)
                    if said is None:
                        return writer.close()
                    writer.write(said or stream_codec.encode_reply(FrameReply(frame.position + 1), request))
        writer.close()
        return None

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


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
