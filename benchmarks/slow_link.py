"""A link that is slow both ways: a relay on loopback that holds back what passes for a while.

Stands for the distance between two machines. It loses and reorders nothing, and has no bound of bytes per second.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from benchmarks.relay import PIECE, Relay, Through, relaying


@dataclass
class SlowLink(Relay):
    """``delay_s``: by which every byte is late, each way; may be changed at any time."""

    delay_s: float = 0.0

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, through: Through) -> None:
        loop = asyncio.get_running_loop()
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, data = await late.get()
                await asyncio.sleep(due - loop.time())
                if not data:
                    return
                sink.write(through(data))
                await sink.drain()

        delivering = asyncio.create_task(deliver())
        try:
            while data := await source.read(PIECE):
                late.put_nowait((loop.time() + self.delay_s, data))
        finally:
            late.put_nowait((loop.time() + self.delay_s, b""))
            await delivering


def slow_link(target_port: int) -> AbstractAsyncContextManager[SlowLink]:
    """A relay on a free port of its own, without delay to begin with."""
    return relaying(SlowLink(target_port))


_ECHOED = bytes(1200)  # what a step sends, about
_ECHOES = 9


@asynccontextmanager
async def echo_link() -> AsyncIterator[SlowLink]:
    """A link of the same kind to somebody who sends back what comes, in this process: see :func:`added_trip_s`."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(PIECE):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    try:
        async with slow_link(server.sockets[0].getsockname()[1]) as link:
            yield link
    finally:
        server.close()


async def added_trip_s(link: SlowLink, delay_s: float) -> float:
    """Seconds that a round trip over a link to an echo takes longer with a delay than without: medians of some.

    That is twice the delay and by what the link's clock is late. What the same trip takes without delay, wake-ups and
    sockets, is not in it.
    """
    taken = {}
    reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
    try:
        for late in (0.0, delay_s):
            link.delay_s = late
            taken[late] = statistics.median([await _trip_s(reader, writer) for _ in range(_ECHOES)])
    finally:
        writer.close()
    return taken[delay_s] - taken[0.0]


async def _trip_s(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
    began = time.perf_counter()
    writer.write(_ECHOED)
    await reader.readexactly(len(_ECHOED))
    return time.perf_counter() - began
