"""A system to compare with that is one process: prompts go to it a line each, times and tokens come back.

Which program it is, is told by `generate` and `one_process`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.figures import TokenTimes
from benchmarks.process_end import wait_or_kill
from benchmarks.systems import Run

START_TIMEOUT_S = 300.0
_LINE_BYTES = 2**22  # a reply holds two numbers for each token


class LineWorker:
    """A worker that is running; see `line_worker`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process
        self._peak: int | None = None

    async def run(self, prompt: Sequence[int], new_tokens: int) -> Run:
        """See `System`. Raises `RuntimeError` if the worker has ended; its messages are on standard error."""
        request = json.dumps({"prompt": list(prompt), "new_tokens": new_tokens})
        if self._process.stdin is None:
            raise RuntimeError("the worker was started without a pipe to write to")
        self._process.stdin.write(request.encode() + b"\n")
        await self._process.stdin.drain()
        reply = await self.reply()
        if len(reply["tokens"]) != new_tokens:
            raise RuntimeError(f"{self.name} gave {len(reply['tokens'])} tokens instead of {new_tokens}")
        self._peak = int(reply["peak_rss"])
        return Run(TokenTimes(tuple(reply["times"])), tuple(reply["tokens"]))

    def peak_rss(self) -> dict[str, int | None]:
        """See `System`."""
        return {self.name: self._peak}

    async def reply(self) -> dict[str, Any]:
        """The next line of the worker."""
        line = await self._process.stdout.readline() if self._process.stdout is not None else b""
        if not line:
            raise RuntimeError(f"the process of {self.name} ended with exit code {await self._process.wait()}")
        document = json.loads(line)
        if not isinstance(document, dict):
            raise TypeError(f"the process of {self.name} wrote {document!r}")
        return document


@asynccontextmanager
async def line_worker(name: str, module: str, arguments: Sequence[str], threads: int) -> AsyncIterator[LineWorker]:
    """Start ``module`` and end it with the block.

    Its OpenMP settings but for the number of threads are the library's own, which suit a process that has the cores for
    itself.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        "--threads",
        str(threads),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        limit=_LINE_BYTES,
    )
    system = LineWorker(name, process)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await system.reply()
        yield system
    finally:
        if process.stdin is not None:
            process.stdin.close()  # it reads lines until there are no more
        await wait_or_kill(process)
