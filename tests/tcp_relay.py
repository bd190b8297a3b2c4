"""A relay between real processes that can cut every connection at once, as a flapping network does.

It can also record and alter what passes, as somebody on the way could.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field


@dataclass
class TcpRelay:
    """Relays to ``target_port`` on loopback. `connections` counts all that were ever made.

    `sent` holds what clients sent; ``alter`` may change each piece of it before it is passed on.
    """

    target_port: int
    port: int = 0
    connections: int = 0
    sent: bytearray = field(default_factory=bytearray)
    alter: Callable[[bytes], bytes] = bytes
    _open: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> int:
        """Break what is open now, both ways; new connections are let in. Returns how many there were."""
        broken = list(self._open)
        for writer in broken:
            writer.transport.abort()
        return len(broken) // 2

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        back = asyncio.create_task(self._pump(up_reader, writer))
        self._tasks.add(back)
        back.add_done_callback(self._tasks.discard)
        await self._pump(reader, up_writer, self._taken)

    def _taken(self, data: bytes) -> bytes:
        self.sent += data
        return self.alter(data)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, through: Callable[[bytes], bytes] = bytes
    ) -> None:
        self._open.add(writer)
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(through(data))
                await writer.drain()
        self._open.discard(writer)
        writer.close()


@asynccontextmanager
async def tcp_relay(target_port: int) -> AsyncIterator[TcpRelay]:
    """A relay on a free port of its own."""
    relay = TcpRelay(target_port)
    server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    relay.port = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        server.close()
        relay.cut()
