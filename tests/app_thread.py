"""An aiohttp application served from a thread of the test: for commands that run in the test's own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web


@contextmanager
def serving_app(app: web.Application) -> Iterator[str]:
    """Serve ``app`` on a free port of loopback while the block runs; yields its URL."""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    found: list[str] = []
    started = threading.Event()

    async def serve() -> None:
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        started.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert started.wait(20)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
