"""The HTTP transport before peers that break, hang, hang up or speak otherwise: byte by byte, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace

import pytest

from golden_frames import DECODE, GOLDEN, HOST, PREFILL, SESSION, Golden
from meshnet_core.errors import (
    DeadlineError,
    HopFailedError,
    HopUnreachableError,
)
from meshnet_core.http_transport import HttpTransport
from meshnet_core.stream_transport import WireTransport
from served_hop import OPEN, Node, refusal

Handler = Callable[[int, int, bytes], bytes | None]


@contextlib.asynccontextmanager
async def scripted_peer(handler: Handler) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A peer that answers request ``n`` of connection ``c`` with ``handler(c, n, request)``; None closes."""
    requests: list[bytes] = []
    connections = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connection, served = connections, 0
        connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")), 0
                )
                requests.append(head + await reader.readexactly(length))
                answer = handler(connection, served, requests[-1])
                served += 1
                if answer is None:
                    break
                writer.write(answer)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requests
    finally:
        server.close()


def http_answer(body: bytes, status: str = "200 OK", extra: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\n{extra}Content-Length: {len(body)}\r\n\r\n".encode() + body


YES = http_answer(PREFILL.reply_json.encode())


@pytest.mark.parametrize("golden", GOLDEN.values(), ids=GOLDEN)
async def test_a_frame_on_the_wire_is_these_lines_and_bytes_and_no_more(http: HttpTransport, golden: Golden) -> None:
    async with scripted_peer(lambda *_: YES) as (url, requests):
        await http.forward(url, golden.frame)
    head, body = requests[0].split(b"\r\n\r\n", 1)
    first, *lines = head.decode().split("\r\n")
    sent = [HOST.join(("Host: ", "")) if line.startswith("Host: ") else line for line in lines]
    wanted = golden.request_text().split("\n")
    assert (first, sorted(sent), body) == (wanted[0], sorted(wanted[1:-2]), bytes.fromhex(golden.body_hex))


async def test_a_kept_alive_connection_found_closed_costs_one_retry(http: HttpTransport) -> None:
    async with scripted_peer(lambda connection, n, _: YES if (connection, n) != (0, 1) else None) as (url, requests):
        for _ in range(3):
            assert (await http.forward(url, DECODE.frame)).position == 261
    assert len(requests) == 4  # the second frame went twice

    def without_deadline(request: bytes) -> list[bytes]:
        return [line for line in request.split(b"\r\n") if not line.startswith(b"X-Meshnet-Deadline-Ms")]

    assert without_deadline(requests[1]) == without_deadline(requests[2])


async def test_a_retry_is_given_only_what_is_left_of_the_deadline() -> None:
    clock = SteppingClock(step=10.0)
    transport = HttpTransport(clock)
    async with scripted_peer(lambda connection, n, _: YES if (connection, n) != (0, 1) else None) as (url, requests):
        await transport.forward(url, DECODE.frame)
        await transport.forward(url, DECODE.frame)
    await transport.close()
    deadlines = [
        dict(pair(line) for line in request.split(b"\r\n")[1:-2])["X-Meshnet-Deadline-Ms"] for request in requests
    ]
    assert deadlines == ["28417", "28417", "18417"]


@dataclass
class SteppingClock:
    """Moves on by ``step`` seconds whenever it is looked at."""

    step: float
    at: float = 0.0

    def now(self) -> float:
        self.at += self.step
        return self.at


def pair(line: bytes) -> tuple[str, str]:
    name, _, value = line.decode().partition(": ")
    return name, value


@pytest.mark.parametrize("first", [0, 1], ids=["on a new connection", "again on the retry"])
async def test_a_connection_that_breaks_is_an_unreachable_hop(http: HttpTransport, first: int) -> None:
    async with scripted_peer(lambda connection, n, _: YES if connection == 0 and n < first else None) as (
        url,
        requests,
    ):
        for _ in range(first):
            await http.forward(url, DECODE.frame)
        error = await refusal(http.forward(url, DECODE.frame))
    assert isinstance(error, HopUnreachableError)
    assert error.hop_index == 1
    assert url in error.message
    assert len(requests) == 1 + 2 * first


async def test_a_reply_that_breaks_off_is_an_unreachable_hop(http: HttpTransport) -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(YES[:-10])
        writer.close()

    server = await asyncio.start_server(cut, "127.0.0.1", 0)
    error = await refusal(http.forward(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", DECODE.frame))
    assert isinstance(error, HopUnreachableError)
    server.close()


async def test_a_port_where_nothing_listens_is_an_unreachable_hop(transport: WireTransport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    told: tuple[Awaitable[object], ...] = (transport.forward(url, DECODE.frame), transport.open(url, OPEN.for_hop(1)))
    for call in told:
        error = await refusal(call)
        assert isinstance(error, HopUnreachableError)
        assert (error.hop_index, error.boot) == (1, None)
    others: tuple[Awaitable[object], ...] = (transport.probe(url, None), transport.release(url, SESSION))
    for call in (*others, transport.probe("http://", None)):
        assert isinstance(await refusal(call), HopUnreachableError)


@pytest.mark.parametrize(
    "answer",
    [
        http_answer(b"<html>Bad gateway</html>", "502 Bad Gateway"),
        http_answer(b'{"error": "quota"}', "429 Too Many Requests"),
        http_answer(b'{"error": {"code": "from_a_newer_peer", "message": "x"}}', "418 Teapot"),
        http_answer(b"", "302 Found", "Location: http://127.0.0.1:9/\r\n"),
        http_answer(b"not json"),
        http_answer(b'{"position": 1}'),
        http_answer(b'{"position": 1, "tokens": 7, "timings": []}'),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n{}",
    ],
)
async def test_an_answer_that_is_not_ours_is_a_failed_hop_and_never_a_foreign_exception(
    transport: WireTransport, answer: bytes
) -> None:
    async with scripted_peer(lambda *_: answer) as (url, _):
        error = await refusal(transport.forward(url, DECODE.frame))
    assert isinstance(error, HopFailedError)


async def test_a_peer_that_speaks_no_http_is_an_unreachable_hop(transport: WireTransport) -> None:
    async with scripted_peer(lambda *_: b"SSH-2.0-OpenSSH_9.2\r\n\r\n") as (url, _):
        assert isinstance(await refusal(transport.forward(url, DECODE.frame)), HopUnreachableError)


async def test_a_hop_that_hangs_past_the_deadline_is_named(node: Node, transport: WireTransport) -> None:
    node.endpoint.gate = asyncio.Event()
    error = await refusal(transport.forward(node.url, replace(DECODE.frame, hop_index=3, deadline_ms=50)))
    assert isinstance(error, DeadlineError)
    assert error.hop_index == 3
    assert "within 0.05 s" in error.message
    node.endpoint.gate.set()


async def test_a_caller_that_goes_away_does_not_cancel_the_forward(node: Node, transport: WireTransport) -> None:
    node.endpoint.gate = asyncio.Event()
    call = asyncio.create_task(transport.forward(node.url, DECODE.frame))
    async with asyncio.timeout(30):
        await node.endpoint.arrived.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.sleep(0.05)  # for the closed connection to be noticed
        node.endpoint.gate.set()
        await node.endpoint.finished.wait()


async def test_a_closed_transport_reaches_nothing(node: Node) -> None:
    transport = HttpTransport()
    await transport.forward(node.url, PREFILL.frame)
    await transport.close()
    await transport.close()
    assert isinstance(await refusal(transport.forward(node.url, PREFILL.frame)), HopUnreachableError)
