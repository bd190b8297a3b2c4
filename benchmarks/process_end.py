"""The end of a process that a benchmark started."""

from __future__ import annotations

import asyncio

GRACE_S = 10.0


async def wait_or_kill(process: asyncio.subprocess.Process) -> None:
    """Wait for a process that was told to end; kill it after :data:`GRACE_S` seconds."""
    try:
        async with asyncio.timeout(GRACE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
