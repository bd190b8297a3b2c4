"""The HTTP transport and a node's HTTP door, over real sockets: frames through, errors back, garbage refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest

from golden_frames import DECODE, GOLDEN, HOST, PREFILL, SESSION, Golden
from meshnet_cli.serving import listen, port_of, serving_aiohttp
from meshnet_core import http_codec
from meshnet_core.clock import SystemClock
from meshnet_core.errors import (
    ERRORS_BY_CODE,
    CacheMissError,
    DeadlineError,
    HopError,
    HopFailedError,
    HopUnreachableError,
    MeshnetError,
    MissReason,
    RequestRefusedError,
)
from meshnet_core.frames import Frame, FrameReply
from meshnet_core.http_transport import HttpTransport
from meshnet_core.layer_range import LayerRange
from meshnet_core.open_document import OpenDocument, OpenReply, ProbeReply
from meshnet_core.prefix import Mark
from meshnet_core.route import Hop, Route
from meshnet_core.sampling import SamplingParams
from meshnet_core.stream_transport import WireTransport, transport_for
from meshnet_core.transport import HopTransport
from meshnet_core.wire_form import WireForm
from meshnet_node.readiness import why_not_ready
from meshnet_node.registration import RegistrationState
from meshnet_node.torch_server import create_app, new_doorkeeper, runner_for

BOOT = "b-0123456789abcdef"
MAX_BODY = 64 * 1024
BODY_TIMEOUT_S = 1.5  # a test sits it out; on a machine that stalls, whole bodies must not
OPEN = OpenDocument(
    session=SESSION,
    epoch=0,
    hop_index=0,
    route=Route("toy", "f-1", 30, (Hop("a", "http://a", LayerRange(0, 15)), Hop("b", "http://b", LayerRange(15, 30)))),
    wire_dtype="bfloat16",
    hidden_size=4,
    cache=True,
    sampling=SamplingParams(temperature=0.7, seed=7, logprobs=1),
    prompt_length=261,
    prefill_length=261,
    expected_length=300,
    step_deadline_ms=30000,
)


@dataclass
class FakeEndpoint:
    """Answers as told and remembers what it was asked; knows no rule of sessions."""

    reply: FrameReply = PREFILL.reply
    error: Exception | None = None
    frames: list[Frame] = field(default_factory=list)
    opened: list[OpenDocument] = field(default_factory=list)
    released: list[tuple[str, int | None]] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=lambda: {SESSION: 2})
    gate: asyncio.Event | None = None  # frames wait for it
    opens_at: int | None = None  # the frame that opens the gate for all
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error

    async def open(self, document: OpenDocument) -> OpenReply:
        self._fail()
        self.opened.append(document)
        return OpenReply(BOOT, 4096)

    async def forward(self, frame: Frame) -> FrameReply:
        self.frames.append(frame)
        self.arrived.set()
        self._fail()
        if self.gate is not None:
            if len(self.frames) == self.opens_at:
                self.gate.set()
            await self.gate.wait()
        self.finished.set()
        return self.reply

    async def release(self, session: str, through_epoch: int | None = None, keep: tuple[Mark, ...] = ()) -> int:
        self._fail()
        self.released.append((session, through_epoch))
        return self.held.pop(session, 0)

    async def probe(self, session: str | None) -> ProbeReply:
        self._fail()
        return ProbeReply(BOOT, None if session is None else 261, 3)


@dataclass
class Node:
    endpoint: FakeEndpoint
    port: int
    not_ready: list[str] = field(default_factory=list)  # the newest is why it is not

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    endpoint, not_ready = FakeEndpoint(), list[str]()
    texts = {"f-1": {"config.json": b"{}", "tokenizer.json": bytes(range(256))}}
    app = create_app(
        endpoint,
        boot=BOOT,
        status=lambda: {"sessions": len(endpoint.held), "state_bytes": 4096, "queued": 3, "dropped": {"evicted": 2}},
        text_files=texts.get,
        max_body=MAX_BODY,
        body_timeout_s=BODY_TIMEOUT_S,
        not_ready=lambda: not_ready[-1] if not_ready else None,
    )
    sock = listen("127.0.0.1", 0)
    async with serving_aiohttp(runner_for(app), sock, None, new_doorkeeper()):
        yield Node(endpoint, port_of(sock), not_ready)


@pytest.fixture
async def http() -> AsyncIterator[HttpTransport]:
    transport = HttpTransport()
    yield transport
    await transport.close()


@pytest.fixture(params=["stream", "http"])
async def transport(request: pytest.FixtureRequest) -> AsyncIterator[WireTransport]:
    """Of either form."""
    transport = transport_for(WireForm(request.param), SystemClock())
    yield transport
    await transport.close()


async def refusal(call: Awaitable[object]) -> MeshnetError:
    with pytest.raises(MeshnetError) as caught:
        await call
    return caught.value


# -- what goes through ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("golden", GOLDEN.values(), ids=GOLDEN)
async def test_a_frame_arrives_whole_and_its_reply_comes_back(
    node: Node, transport: WireTransport, golden: Golden
) -> None:
    node.endpoint.reply = golden.reply
    reply = await transport.forward(node.url, replace(golden.frame, body=memoryview(bytes(golden.frame.body))))
    assert node.endpoint.frames == [golden.frame]
    assert (reply, reply.boot) == (golden.reply, BOOT)


async def test_open_release_and_probe_come_through(node: Node, transport: WireTransport) -> None:
    port: HopTransport = transport  # the type checker compares the two
    assert await port.open(node.url + "/", OPEN.for_hop(1)) == OpenReply(BOOT, 4096)
    assert node.endpoint.opened == [OPEN.for_hop(1)]
    assert await port.probe(node.url, SESSION) == ProbeReply(BOOT, 261, 3)
    assert await port.probe(node.url, None) == ProbeReply(BOOT, None, 3)
    assert [await port.release(node.url, SESSION), await port.release(node.url, SESSION, 3)] == [2, 0]
    assert node.endpoint.released == [(SESSION, None), (SESSION, 3)]


async def test_many_frames_share_the_transport(node: Node, transport: WireTransport) -> None:
    node.endpoint.gate, node.endpoint.opens_at = asyncio.Event(), 50
    replies = await asyncio.gather(*(transport.forward(node.url, PREFILL.frame) for _ in range(50)))
    assert {reply.boot for reply in replies} == {BOOT}


async def test_a_proxy_in_the_environment_is_not_used(
    node: Node, transport: WireTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert (await transport.forward(node.url, PREFILL.frame)).position == 261


# -- a peer under the test's control, byte by byte --------------------------------------------------------------------

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


# -- errors on their way back -----------------------------------------------------------------------------------------


def sample_error(code: str) -> MeshnetError:
    cls = ERRORS_BY_CODE[code]
    if issubclass(cls, CacheMissError):
        return cls("gone", reason=MissReason.EVICTED, hop_index=0, position=17, boot="b-1")
    if issubclass(cls, HopError):
        return cls("no", hop_index=0, position=17, boot="b-1")
    if issubclass(cls, RequestRefusedError):
        return cls("no", param="n")
    return cls("no")


@pytest.mark.parametrize("code", sorted(ERRORS_BY_CODE))
async def test_every_error_arrives_as_what_was_raised(node: Node, transport: WireTransport, code: str) -> None:
    node.endpoint.error = raised = sample_error(code)
    arrived = await refusal(transport.forward(node.url, PREFILL.frame))
    assert type(arrived) is type(raised)
    assert arrived.to_wire() == raised.to_wire()
    async with aiohttp.ClientSession() as session, session.get(node.url + "/hop/probe") as response:
        assert response.status == raised.http_status
        assert await response.json() == raised.to_wire()


async def test_an_error_without_an_address_gets_the_hop_and_the_boot_of_who_answered(
    node: Node, transport: WireTransport
) -> None:
    node.endpoint.error = CacheMissError("gone", reason=MissReason.EXPIRED)
    error = await refusal(transport.forward(node.url, DECODE.frame))
    assert isinstance(error, CacheMissError)
    assert (error.hop_index, error.boot) == (1, BOOT)


async def test_an_error_about_a_later_hop_is_not_given_this_ones_boot(node: Node, transport: WireTransport) -> None:
    node.endpoint.error = HopUnreachableError("nothing answers", hop_index=2)
    error = await refusal(transport.forward(node.url, DECODE.frame))
    assert isinstance(error, HopUnreachableError)
    assert (error.hop_index, error.boot) == (2, None)


async def test_a_foreign_exception_is_a_failed_hop_with_its_traceback_kept_on_the_node(
    node: Node, transport: WireTransport, caplog: pytest.LogCaptureFixture
) -> None:
    node.endpoint.error = ZeroDivisionError("a secret of the node")
    error = await refusal(transport.forward(node.url, DECODE.frame))
    assert isinstance(error, HopFailedError)
    assert error.message == "ZeroDivisionError in /hop/forward; the node's log has the traceback"
    assert "a secret of the node" in caplog.text
    assert "Traceback" in caplog.text


# -- garbage at the port ----------------------------------------------------------------------------------------------


def post(path: str, body: bytes, headers: list[tuple[str, str]], length: int | None = -1) -> bytes:
    """A raw request; ``length`` is what it says of its body: the truth (-1), nothing (None), or something else."""
    lines = [f"{name}: {value}" for name, value in headers]
    if length is not None:
        lines.append(f"Content-Length: {len(body) if length < 0 else length}")
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode("latin-1") + body


def frame_post(body: bytes = bytes(20), *, length: int | None = -1, **changes: str | None) -> bytes:
    headers = dict(PREFILL.headers)
    for key, value in changes.items():
        name = "X-Meshnet-" + key if f"X-Meshnet-{key}" in headers else key.replace("_", "-")
        headers.pop(name, None)
        if value is not None:
            headers[name] = value
    return post("/hop/forward", body, list(headers.items()), length)


async def say(port: int, data: bytes, *, hang_up: bool = False) -> tuple[int, str]:
    """Send bytes; the status and body of what is answered, (0, "") where the connection is closed without a word."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(30):
            writer.write(data)
            if hang_up:
                writer.write_eof()
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length: "))
                return int(head.split()[1]), (await reader.readexactly(length)).decode()
            return 0, ""
    finally:
        writer.close()


def json_post(path: str, body: bytes, **changes: str) -> bytes:
    return post(
        path, body, [*({"X-Meshnet-Protocol": "1"} | {k.replace("_", "-"): v for k, v in changes.items()}).items()]
    )


NOISE = random.Random(20240601).randbytes(512)
OPEN_JSON = http_codec.encode_json(OPEN.to_wire())
TWICE = frame_post().replace(b"X-Meshnet-Epoch: 0\r\n", b"X-Meshnet-Epoch: 0\r\nX-Meshnet-Epoch: 1\r\n")

GARBAGE: dict[str, tuple[bytes, int, str]] = {
    "random bytes": (NOISE, 400, ""),
    "random bytes after a request line": (b"POST /hop/forward HTTP/1.1\r\n" + NOISE + b"\r\n\r\n", 400, ""),
    "a TLS greeting": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + NOISE, 400, ""),
    "no HTTP version": (b"POST /hop/forward\r\n\r\n", 400, ""),
    "an endless header": (frame_post(Junk="x" * 10000), 400, "8190"),
    "a negative length": (frame_post(length=None).replace(b"\r\n\r\n", b"\r\nContent-Length: -5\r\n\r\n"), 400, ""),
    "no length": (frame_post(b"", length=None), 400, "needs a Content-Length"),
    "a chunked body": (
        frame_post(b"0\r\n\r\n", length=None, Transfer_Encoding="chunked"),
        400,
        "chunked bodies are not",
    ),
    "a compressed body": (frame_post(Content_Encoding="gzip"), 400, "Content-Encoding"),
    "a frame as JSON": (frame_post(Content_Type="application/json"), 400, "takes application/octet-stream"),
    "too long a body": (frame_post(b"", length=MAX_BODY + 1), 413, f"at most {MAX_BODY}"),
    "a truncated body": (
        frame_post(length=1152),
        400,
        f"of a body of 1152 bytes not all came within {BODY_TIMEOUT_S:g} s",
    ),
    "another protocol": (frame_post(Protocol="2"), 426, "this node speaks 1"),
    "a header missing": (frame_post(Position=None), 400, "lacks X-Meshnet-Position"),
    "a header twice": (TWICE, 400, "X-Meshnet-Epoch is there more than once"),
    "a header unknown": (frame_post(X_Meshnet_Shape="1,5"), 400, "unknown header 'x-meshnet-shape'"),
    "a position below zero": (frame_post(Position="-1"), 400, "X-Meshnet-Position must be a whole number"),
    "a phase unknown": (frame_post(Phase="guess"), 400, "must be one of prefill, decode, resume, verify"),
    "bytes in a header": (frame_post(Session="\xff\xfe"), 400, "X-Meshnet-Session must be 1 to 64"),
    "a query on a frame": (frame_post().replace(b"/forward ", b"/forward?cache=on "), 400, "'cache'"),
    "no JSON at open": (json_post("/hop/open", b"\x00\x01"), 400, "must be JSON"),
    "deep JSON at open": (json_post("/hop/open", b"[" * 50000), 400, "must be JSON"),
    "a list at open": (json_post("/hop/open", b"[]"), 400, "a JSON object"),
    "an open without a route": (json_post("/hop/open", OPEN_JSON.replace(b'"route"', b'"rout"')), 400, "'rout'|rout"),
    "an open without protocol": (post("/hop/open", OPEN_JSON, []), 400, "X-Meshnet-Protocol must be there once"),
    "an open of another protocol": (json_post("/hop/open", b"{}", X_Meshnet_Protocol="9"), 426, "speaks 1"),
    "a release of nothing": (json_post("/hop/release", b"{}"), 400, '"session'),
    "a probe of no id": (b"GET /hop/probe?session=a/b HTTP/1.1\r\nHost: x\r\n\r\n", 400, "session must be"),
    "a probe of two": (b"GET /hop/probe?session=a&session=b HTTP/1.1\r\nHost: x\r\n\r\n", 400, "more than once"),
    "a query unknown": (b"GET /healthz?verbose=1 HTTP/1.1\r\nHost: x\r\n\r\n", 400, "'verbose'"),
    "a path unknown": (b"GET /hop/forwards HTTP/1.1\r\nHost: x\r\n\r\n", 404, "no such path: /hop/forwards"),
    "a path out of the tree": (b"GET /text/..%2f..%2fetc HTTP/1.1\r\nHost: x\r\n\r\n", 404, ""),
    "a method unfit": (b"GET /hop/forward HTTP/1.1\r\nHost: x\r\n\r\n", 405, "takes POST, not GET"),
    "a model unknown": (b"GET /text/f-2 HTTP/1.1\r\nHost: x\r\n\r\n", 404, "no model with fingerprint 'f-2'"),
}
NOT_HTTP = {
    "random bytes",
    "random bytes after a request line",
    "a TLS greeting",
    "no HTTP version",
    "an endless header",
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_gets_a_reason_and_the_next_good_request_works(
    node: Node, transport: WireTransport, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    data, status, reason = GARBAGE[name]
    answered, text = await say(node.port, data)
    assert answered == status
    assert any(part.replace('"', '\\"') in text or part in text for part in reason.split("|"))
    assert text
    if name not in NOT_HTTP | {"a negative length"}:  # what is HTTP is answered in our words
        assert json.loads(text)["error"]["code"] in ERRORS_BY_CODE
    assert node.endpoint.frames == []
    assert node.endpoint.opened == []
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert await transport.forward(node.url, PREFILL.frame) == PREFILL.reply


@pytest.mark.parametrize("data", [frame_post(length=1152), frame_post()[:60], b"POST"], ids=["body", "head", "line"])
async def test_a_caller_that_hangs_up_early_is_let_go(node: Node, transport: WireTransport, data: bytes) -> None:
    answered, _ = await say(node.port, data, hang_up=True)
    assert answered in {0, 400}
    assert await transport.forward(node.url, PREFILL.frame) == PREFILL.reply


async def test_the_connection_is_kept_after_a_refusal_that_was_read_whole(node: Node) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
    writer.write(frame_post(Phase="guess") + frame_post())
    statuses = []
    for _ in range(2):
        head = await reader.readuntil(b"\r\n\r\n")
        statuses.append(int(head.split()[1]))
        length = next(int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length: "))
        await reader.readexactly(length)
    assert statuses == [400, 200]
    writer.close()


# -- the other paths --------------------------------------------------------------------------------------------------


async def test_status_text_files_and_metrics_are_told(node: Node, transport: WireTransport) -> None:
    await transport.forward(node.url, PREFILL.frame)
    node.endpoint.error = CacheMissError("gone", reason=MissReason.EVICTED)
    await refusal(transport.forward(node.url, PREFILL.frame))
    async with aiohttp.ClientSession(node.url) as session:
        async with session.get("/healthz") as response:
            assert (await response.json())["sessions"] == 1
            assert response.headers[http_codec.BOOT] == BOOT
        async with session.get("/text/f-1") as response:
            files: dict[str, Any] = await response.json()
            assert files["config.json"] == "e30="
            assert sorted(files) == ["config.json", "tokenizer.json"]
        async with session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert 'meshnet_node_calls_total{call="/hop/forward",result="ok"} 1.0' in lines
    assert 'meshnet_node_calls_total{call="/hop/forward",result="cache_miss"} 1.0' in lines
    assert 'meshnet_node_sessions_dropped_total{reason="evicted"} 2.0' in lines
    assert 'meshnet_node_received_bytes_total{call="/hop/forward"} 40.0' in lines
    assert "meshnet_node_state_bytes 4096.0" in lines
    assert 'meshnet_node_frame_seconds_count{part="forward"} 1.0' in lines
    assert 'meshnet_node_frame_seconds_sum{part="queue"} 0.000125' in lines


async def test_readiness_is_told_with_its_reason(node: Node) -> None:
    async with aiohttp.ClientSession(node.url) as session:
        async with session.get("/readyz") as response:
            assert (response.status, await response.json()) == (200, {"status": "ready"})
        node.not_ready.append("no layers are loaded")
        async with session.get("/readyz") as response:
            assert (response.status, await response.json()) == (
                503,
                {"status": "not ready", "reason": "no layers are loaded"},
            )
        async with session.get("/healthz") as response:
            assert response.status == 200  # alive it is


@pytest.mark.parametrize(
    ("state", "loaded", "draining", "why"),
    [
        (RegistrationState.REGISTERED, 1, False, None),
        (RegistrationState.REGISTERED, 1, True, "draining"),
        (RegistrationState.REGISTERED, 0, False, "no layers are loaded"),
        (RegistrationState.NEW, 2, False, "not registered"),
        (RegistrationState.UNREACHABLE, 2, False, "unreachable"),
        (RegistrationState.REFUSED, 2, False, "refused"),
        (RegistrationState.FAILED, 2, False, "failed"),
    ],
)
def test_a_node_is_ready_once_it_is_registered_with_layers_loaded(
    state: RegistrationState, loaded: int, draining: bool, why: str | None
) -> None:
    said = why_not_ready(state, loaded_shards=loaded, draining=draining)
    assert (said is None) if why is None else (why in (said or ""))


async def test_a_small_frame_is_not_held_back(node: Node, transport: WireTransport) -> None:
    """Nagle's delay against delayed acknowledgements would cost every step some 40 ms, a busy machine only some."""
    quickest = float("inf")
    async with asyncio.timeout(60):
        while quickest >= 0.03:
            began = time.perf_counter()
            await transport.forward(node.url, DECODE.frame)
            quickest = min(quickest, time.perf_counter() - began)
