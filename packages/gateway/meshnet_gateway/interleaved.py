"""Several async generators read at once, as their items come. Knows nothing of what they give."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def interleaved(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T | None]]:
    """Items of all streams, each with the index of its stream, and None at the end of each.

    The first error of any stream ends them all. Every stream is closed, and its clean-up awaited, whatever ends this
    one; none runs ahead of the others by more than a few items. Items are neither None nor exceptions.
    """
    if len(streams) == 1:  # the usual case, without a task and a queue
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        yield 0, None
        return
    queue: asyncio.Queue[tuple[int, T | Exception | None]] = asyncio.Queue(maxsize=len(streams))
    readers = [asyncio.create_task(_read(stream, index, queue)) for index, stream in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            index, found = await queue.get()
            if isinstance(found, Exception):
                raise found
            left -= found is None
            yield index, found
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(stream: AsyncGenerator[T], index: int, queue: asyncio.Queue[tuple[int, T | Exception | None]]) -> None:
    end: Exception | None = None
    try:
        async with aclosing(stream):
            async for item in stream:
                await queue.put((index, item))
    except Exception as error:  # noqa: BLE001 - it is raised where the items are read
        end = error
    await queue.put((index, end))
