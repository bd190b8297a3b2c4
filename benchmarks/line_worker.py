"""transformers' `generate()` as a system to compare with: one process, the whole model, a dynamic cache."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.figures import TokenTimes
from benchmarks.systems import Run

START_TIMEOUT_S = 300.0
GRACE_S = 10.0
_LINE_BYTES = 2**22  # a reply holds two numbers for each token


class GenerateSystem:
    """A `generate_worker` that is running; see `generate_system`."""

    name = "generate()"

    def __init__(self, process: asyncio.subprocess.Process) -> None:
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
            raise RuntimeError(f"generate() gave {len(reply['tokens'])} tokens instead of {new_tokens}")
        self._peak = int(reply["peak_rss"])
        return Run(TokenTimes(tuple(reply["times"])), tuple(reply["tokens"]))

    def peak_rss(self) -> dict[str, int | None]:
        """See `System`."""
        return {"generate()": self._peak}

    async def reply(self) -> dict[str, Any]:
        """The next line of the worker."""
        line = await self._process.stdout.readline() if self._process.stdout is not None else b""
        if not line:
            raise RuntimeError(f"the process of generate() ended with exit code {await self._process.wait()}")
        document = json.loads(line)
        if not isinstance(document, dict):
            raise TypeError(f"the process of generate() wrote {document!r}")
        return document


@asynccontextmanager
async def generate_system(folder: str, *, dtype: str, device: str, threads: int) -> AsyncIterator[GenerateSystem]:
    """Start the worker on a model folder and end it with the block.

    Its OpenMP settings are the library's own, which suit a process that has the cores for itself.
    """
    arguments = [folder, "--dtype", dtype, "--device", device, "--threads", str(threads)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.generate_worker",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        limit=_LINE_BYTES,
    )
    system = GenerateSystem(process)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await system.reply()
        yield system
    finally:
        if process.stdin is not None:
            process.stdin.close()  # it reads lines until there are no more
        try:
            async with asyncio.timeout(GRACE_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
