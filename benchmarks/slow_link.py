"""A link that is slow both ways: a relay on loopback that holds back what passes for a while.

Stands for the distance between two machines. It loses and reorders nothing, and has no bound of bytes per second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

_PIECE = 2**18  # bytes


@dataclass
class SlowLink:
    """Relays to ``target_port``.

    Attributes:
        target_port: on loopback.
        delay_s: by which every byte is late, each way; may be changed at any time.
        port: where it listens.
    """

    target_port: int
    delay_s: float = 0.0
    port: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Of one connection, both ways."""
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target_port)
        except ConnectionError:  # as if nobody listened here
            writer.close()
            return
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._carry(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, data = await late.get()
                await asyncio.sleep(due - loop.time())
                if not data:
                    return
                sink.write(data)
                await sink.drain()

        delivering = asyncio.create_task(deliver())
        with suppress(ConnectionError):
            while data := await source.read(_PIECE):
                late.put_nowait((loop.time() + self.delay_s, data))
        late.put_nowait((loop.time() + self.delay_s, b""))
        with suppress(ConnectionError):
            await delivering
        sink.close()


@asynccontextmanager
async def slow_link(target_port: int) -> AsyncIterator[SlowLink]:
    """A relay on a free port of its own, without delay to begin with."""
    link = SlowLink(target_port)
    server = await asyncio.start_server(link.serve, "127.0.0.1", 0)
    link.port = server.sockets[0].getsockname()[1]
    try:
        yield link
    finally:
        server.close()
        for task in list(link._tasks):
            task.cancel()
        await asyncio.gather(*link._tasks, return_exceptions=True)
