"""A link that is slow both ways: a relay on loopback that holds back what passes for a while.

Stands for the distance between two machines. It loses and reorders nothing, and has no bound of bytes per second.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
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
