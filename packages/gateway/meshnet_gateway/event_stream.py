"""Answers that end when their client is gone: server-sent events, and any work on behalf of a request.

Plain ASGI. Knows nothing of generations; what it cancels must free what it holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

# no-transform and X-Accel-Buffering keep proxies from holding chunks back or packing them.
SSE_HEADERS = {
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
    "content-type": "text/event-stream; charset=utf-8",
}

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed its connection; nobody is left to answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end, or cancel it and wait for its clean-up as soon as the client is gone.

    Args:
        receive: of a request whose body has been read.
        work: done in a task of its own.

    Raises:
        ClientGoneError: the client left first.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends what a generator yields, as it comes.

    The status line goes out with the first bytes, so that an error before them can still have a status of its own.
    The generator is closed, and its clean-up awaited, whatever ends the stream.

    Args:
        events: whole events, or comment lines, with the blank line that ends each.
        headers: besides `SSE_HEADERS`.
        farewell: sent last where the server itself stops in mid-stream, so that no stream ends without a word.
    """

    def __init__(self, events: AsyncGenerator[bytes], headers: dict[str, str], farewell: bytes = b"") -> None:
        super().__init__(headers={**headers, **SSE_HEADERS})
        del self.headers["content-length"]
        self._events = events
        self._farewell = farewell
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except ClientGoneError:
            return
        except asyncio.CancelledError:
            if self._started:
                await send({"type": "http.response.body", "body": self._farewell, "more_body": False})
            raise

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for event in events:
                if not self._started:
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                    self._started = True
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
