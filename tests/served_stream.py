"""A node that answers frames on lean streams; a connection to it, and a peer, under the test's control."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from golden_frames import DECODE, PREFILL
from meshnet_cli.serving import listen, port_of, serving_aiohttp
from meshnet_core import stream_codec
from meshnet_core.doorkeeper import Doorkeeper
from meshnet_core.frames import Frame, FrameReply
from meshnet_core.stream_codec import STREAM, MessageBuffer
from meshnet_node.node_metrics import NodeMetrics
from meshnet_node.torch_server import create_app, new_doorkeeper, runner_for

BOOT = "b-0123456789abcdef"
MAX_BODY = 4096
BODY_TIMEOUT_S = 1.5  # two tests sit it out; on a machine that stalls, whole messages must not
UPGRADE = f"GET /hop/stream HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: {STREAM}\r\n\r\n".encode()
PATIENCE_S = 60  # for what comes at once, on a machine that is busy
GOOD = bytes.fromhex(PREFILL.stream_frame)


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


def at(position: int) -> Frame:
    return replace(DECODE.frame, position=position)


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
