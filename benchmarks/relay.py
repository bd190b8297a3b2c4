"""A relay between real processes, on loopback: the part that whatever sits on the way has in common, for tests too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

PIECE = 2**18  # bytes that are read at once
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
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except ConnectionError:  # as if nobody listened here
            writer.close()
            return
        back = asyncio.create_task(self._carry(up_reader, writer, answered))
        self._tasks.add(back)
        back.add_done_callback(self._tasks.discard)
        await self._carry(reader, up_writer, sent)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, through: Through) -> None:
        self._open.add(sink)
        with suppress(ConnectionError):
            await self._pump(source, sink, through)
        self._open.discard(sink)
        sink.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, through: Through) -> None:
        """Pass on what comes until nothing more does."""
        while data := await source.read(PIECE):
            sink.write(through(data))
            await sink.drain()


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
        for task in list(relay._tasks):
            task.cancel()
        await asyncio.gather(*relay._tasks, return_exceptions=True)
