"""The answering side of one lean stream: frames come in on a connection that began as an HTTP request, answers go out.

Knows messages and their bounds; what a frame means is told by whoever answers it. A caller that goes away cancels
nothing, as over HTTP. See ``docs/wire-protocol.md``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from meshnet_core.errors import BadFrameError, MeshnetError, TooLargeError
from meshnet_core.frames import Frame
from meshnet_core.stream_codec import (
    CONNECTION,
    MAX_HEAD,
    READ_BYTES,
    STREAM,
    MessageBuffer,
    decode_frame,
    encode_refusal,
    request_of,
)

MAX_IN_FLIGHT = 256  # frames of one connection; what comes beyond them is not read until some are answered
LINGER_S = 0.5  # a connection that is read no more is closed this much later, so that the refusal is not lost with it

Send = Callable[[bytes], None]
# Answers a frame, given its request number, with the message that goes back; or, where it returns None, gives that to
# the third argument, later or at once. Raises nothing.
Answer = Callable[[int, Frame, Send], Coroutine[Any, Any, bytes] | None]
Refused = Callable[[MeshnetError, int], None]


class FrameStream(asyncio.BufferedProtocol):
    """One connection.

    Args:
        answer: answers a frame.
        refused: is told of what was refused before it was a frame, and of its size in bytes.
        protocols: versions that the node speaks.
        max_body: bytes of body accepted.
        body_timeout_s: seconds in which a message that has begun must have arrived.
        idle_s: seconds after which a connection without frames is closed.
        on_lost: is called with asyncio's reason once the connection is gone.
    """

    def __init__(
        self,
        answer: Answer,
        refused: Refused,
        *,
        protocols: range,
        max_body: int,
        body_timeout_s: float,
        idle_s: float,
        on_lost: Callable[[Exception | None], None],
    ) -> None:
        self._answer = answer
        self._refused = refused
        self._protocols = protocols
        self._max_body = max_body
        self._body_timeout_s = body_timeout_s
        self._idle_s = idle_s
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._read = memoryview(bytearray(READ_BYTES))
        self._messages = MessageBuffer(MAX_HEAD + max_body)
        self._owed = 0  # answers to frames
        self._tasks: set[asyncio.Task[None]] = set()
        self._bytes_in_flight = 0
        self._deaf = False  # whatever comes is thrown away
        self._full = False  # reading waits until some frames are answered
        self._blocked = False  # the caller does not read its answers
        self._waits = False  # the transport was told to wait
        self._late: asyncio.TimerHandle | None = None
        self._active_at = self._loop.time()
        self._idle = self._loop.call_later(idle_s, self._check_idle)
        self.gone: asyncio.Future[None] = self._loop.create_future()

    def finish(self) -> None:
        """Read no more, and close once all that was read is answered. Idempotent."""
        self._deaf = True
        self._arrived()
        self._close_if_done()

    def abort(self) -> None:
        """End it at once, with what runs for it."""
        for task in list(self._tasks):
            task.cancel()
        self._end()

    # -- asyncio's side ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - of a stream socket
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._read

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(self._read[:nbytes])

    def data_received(self, data: bytes | memoryview) -> None:
        if self._deaf:
            return
        self._messages.feed(data)
        self._take_in()

    def eof_received(self) -> None:
        self.finish()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport, self._deaf = None, True
        self._idle.cancel()
        self._arrived()
        if not self.gone.done():
            self.gone.set_result(None)
        self._on_lost(error)

    def pause_writing(self) -> None:
        self._blocked = True
        self._read_or_wait()

    def resume_writing(self) -> None:
        self._blocked = False
        self._take_in()

    # -- messages ------------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Begin on the whole messages that are there, as far as there is room for them."""
        while not self._deaf and not self._is_full():
            message: bytes | None = None
            try:
                message = self._messages.take()
                if message is None:
                    break
                self._arrived()
                request, frame = decode_frame(message, self._protocols)
                if len(frame.body) > self._max_body:
                    raise TooLargeError(
                        f"a body of {len(frame.body)} bytes is too large; this node reads at most {self._max_body}"
                    )
            except MeshnetError as error:
                self._refuse(error, self._messages.request if message is None else request_of(message))
                return
            self._begin(request, frame)
        self._watch_arrival()
        self._read_or_wait()

    def _begin(self, request: int, frame: Frame) -> None:
        size = len(frame.body)
        self._owed += 1
        self._bytes_in_flight += size
        answer = self._answer(request, frame, partial(self._answered, size))
        if answer is not None:
            task = self._loop.create_task(self._awaited(answer, size))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _awaited(self, answer: Coroutine[Any, Any, bytes], size: int) -> None:
        message = b""
        try:
            message = await answer
        finally:
            self._answered(size, message)

    def _answered(self, size: int, message: bytes) -> None:
        if message:
            self._send(message)
        self._owed -= 1
        self._bytes_in_flight -= size
        self._active_at = self._loop.time()
        if self._full:
            self._loop.call_soon(self._take_in)  # not within what tells this answer
        self._close_if_done()

    def _send(self, message: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(message)

    def _refuse(self, error: MeshnetError, request: int) -> None:
        """Say what was wrong, to whoever asked where that can be told; where a message is ill-formed, where the next
        one begins is anybody's guess, so nothing more is read."""
        self._refused(error, len(self._messages))
        if request != CONNECTION:
            self._send(encode_refusal(error, request))
        self._send(encode_refusal(error, CONNECTION))
        self.finish()

    # -- bounds --------------------------------------------------------------------------------------------------------

    def _is_full(self) -> bool:
        self._full = self._owed >= MAX_IN_FLIGHT or self._bytes_in_flight > self._max_body or self._blocked
        return self._full

    def _read_or_wait(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        waits = self._is_full() and not self._deaf
        if waits != self._waits:
            self._waits = waits
            (self._transport.pause_reading if waits else self._transport.resume_reading)()

    def _watch_arrival(self) -> None:
        """A message that has begun has a while to come whole, but for the time in which it is not read."""
        if self._full:
            self._arrived()
        elif len(self._messages) and self._late is None:
            self._late = self._loop.call_later(self._body_timeout_s, self._too_late)

    def _arrived(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._late = None
        error = BadFrameError(
            f"of a message only {len(self._messages)} bytes came within {self._body_timeout_s:g} s; "
            "send what was announced"
        )
        self._refuse(error, self._messages.request)

    def _check_idle(self) -> None:
        left_s = self._active_at + self._idle_s - self._loop.time()
        busy = self._owed > 0 or self._late is not None  # a message that is on its way has a limit of its own
        if busy or left_s > 0:
            self._idle = self._loop.call_later(self._idle_s if busy else left_s, self._check_idle)
        else:
            self._end()

    def _end(self) -> None:
        """Who does not read what was sent might never; otherwise it would be waited for."""
        if self._transport is not None:
            unread = self._transport.get_write_buffer_size() > 0
            (self._transport.abort if unread else self._transport.close)()

    def _close_if_done(self) -> None:
        if self._deaf and not self._owed and self._transport is not None and not self._transport.is_closing():
            self._read_or_wait()
            self._loop.call_later(LINGER_S, self._transport.close)


class SwitchedResponse(web.StreamResponse):
    """The answer to an upgrade: the connection is ``make``'s stream from here on, until it ends.

    Args:
        make: makes the stream, given what it has to call when the connection is gone.
        streams: holds the stream while it lasts.
    """

    def __init__(
        self, make: Callable[[Callable[[Exception | None], None]], FrameStream], streams: set[FrameStream]
    ) -> None:
        super().__init__(status=101)
        self._make = make
        self._streams = streams

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Switch; returns when the connection is gone, so that aiohttp counts it as busy until then."""
        transport, http = request.transport, request.protocol
        if transport is None:
            raise ConnectionResetError("the caller has left")
        stream = self._make(http.connection_lost)
        self._streams.add(stream)
        try:
            transport.set_protocol(stream)
            stream.connection_made(transport)
            lines = [f"{name}: {value}" for name, value in self.headers.items()]
            head = ["HTTP/1.1 101 Switching Protocols", "Connection: Upgrade", f"Upgrade: {STREAM}", *lines, "", ""]
            transport.write("\r\n".join(head).encode("ascii"))
            await stream.gone
        except asyncio.CancelledError:  # the server stops
            stream.abort()
            raise
        finally:
            self._streams.discard(stream)
        return None

    async def write_eof(self, data: Any = b"") -> None:
        """Nothing: the stream has ended."""
