"""Garbage at a node's port gets a reason, and the next good request works."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random

import pytest

from golden_frames import PREFILL
from meshnet_core import http_codec
from meshnet_core.errors import (
    ERRORS_BY_CODE,
)
from meshnet_core.stream_transport import WireTransport
from served_hop import BODY_TIMEOUT_S, MAX_BODY, OPEN, Node


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
