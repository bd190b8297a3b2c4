"""A relay between real processes, on loopback: the part that whatever sits on the way has in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

Through = Callable[[bytes], bytes]
"""Is given each piece that comes, and returns what is passed on."""


@dataclass
class Relay:
    """Relays to ``target_port``, which may begin to listen later.

    Attributes:
        target_port: on loopback.
        port: where it listens.
    """

    target_port: int
    port: int = 0
    _open: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def sent_through(self) -> Through:
        """What a client sends goes through; asked for each connection, as it is made."""
        return bytes

    def answered_through(self) -> Through:
        """Likewise what it is answered."""
        return bytes

    def cut(self) -> int:
        """Break what is open now, both ways; new connections are let in. Returns how many there were."""
        broken = list(self._open)
        for writer in broken:
            writer.transport.abort()
        return len(broken) // 2

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Of one connection, both ways."""
        sent, answered = self.sent_through(), self.answered_through()
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        back = asyncio.create_task(self._pump(up_reader, writer, answered))
        self._tasks.add(back)
        back.add_done_callback(self._tasks.discard)
        await self._pump(reader, up_writer, sent)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, through: Through) -> None:
        self._open.add(writer)
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(through(data))
                await writer.drain()
        self._open.discard(writer)
        writer.close()


R = TypeVar("R", bound=Relay)


@asynccontextmanager
async def relaying(relay: R) -> AsyncIterator[R]:
    """The relay, on a free port of its own."""
    server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    relay.port = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        server.close()
        relay.cut()
