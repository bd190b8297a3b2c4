"""Processes of peers: started, waited for, ended. Knows no peer."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.process_end import wait_or_kill

START_TIMEOUT_S = 120.0
_POLL_S = 0.1
_LAST_LINES = 12


@dataclass(frozen=True, slots=True)
class PeerProcess:
    """One that runs, and the file that it writes to."""

    process: asyncio.subprocess.Process
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def said(self) -> str:
        """All that it has written."""
        return self.log.read_text("utf-8", "replace")


@asynccontextmanager
async def peer_process(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> AsyncIterator[PeerProcess]:
    """Start one and end it with the block; ``environment`` comes on top of this process's own."""
    with tempfile.NamedTemporaryFile(prefix="meshnet-bench-") as log:
        process = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, **(environment or {})}, stdout=log.fileno(), stderr=log.fileno()
        )
        try:
            yield PeerProcess(process, Path(log.name))
        finally:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    await wait_or_kill(process)


async def until(processes: Sequence[PeerProcess], ready: Callable[[], Awaitable[bool]]) -> None:
    """Wait for ``ready``.

    Raises:
        RuntimeError: one of ``processes`` ended, or it took too long; with what the last of them said last.
    """
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not await ready():
                for one in processes:
                    if (code := one.process.returncode) is not None:
                        raise RuntimeError(f"it ended with exit code {code} before it was ready:\n{_last_lines(one)}")
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        said = _last_lines(processes[-1])
        raise RuntimeError(f"it was not ready after {START_TIMEOUT_S:.0f} s:\n{said}") from error


def _last_lines(one: PeerProcess) -> str:
    return "\n".join(one.said().splitlines()[-_LAST_LINES:])


async def listens(port: int) -> bool:
    """Whether somebody does on that port of loopback."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
