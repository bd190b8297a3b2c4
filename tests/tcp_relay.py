"""A relay between real processes that can cut every connection at once, as a flapping network does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field


@dataclass
class TcpRelay:
    """Relays to ``target_port`` on loopback. `connections` counts all that were ever made."""

    target_port: int
    port: int = 0
    connections: int = 0
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
        await self._pump(reader, up_writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
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
