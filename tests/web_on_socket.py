"""aiohttp applications on a real socket of this machine, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from aiohttp import web


@contextlib.asynccontextmanager
async def serving(app: web.Application, port: int = 0) -> AsyncIterator[str]:
    """Serve ``app`` on loopback, on a free port unless one is given; yields its URL."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)  # 0 would be for ever
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
