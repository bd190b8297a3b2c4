"""The calling side of one lean stream: an HTTP upgrade, then frames out and answers in, many at once.

Knows one connection; which hop gets which, and when a frame is sent again, is `stream_transport`'s.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit

from meshnet_core.errors import BadFrameError, HopFailedError, MeshnetError, RateLimitedError, error_from_wire
from meshnet_core.frames import Frame, FrameReply
from meshnet_core.http_codec import BOOT, decode_json
from meshnet_core.settle import settle
from meshnet_core.stream_codec import (
    CONNECTION,
    MAX_REQUEST,
    READ_BYTES,
    STREAM,
    MessageBuffer,
    decode_answer,
    encode_frame,
)

PATH = "/hop/stream"
HANDSHAKE_S = 10.0
UPGRADE_S = 15.0  # whoever has not answered the upgrade by then, a hop or what stands before it, is sent posts
MAX_REFUSAL_BYTES = 64 * 1024  # of the answer to an upgrade
MAX_REPLY_BYTES = 8 * 2**20


class NoStreamError(Exception):
    """What answered the upgrade speaks HTTP, but no stream."""


class StreamLostError(Exception):
    """The connection is gone; says why, and whether it was because what came on it was ``unreadable``."""

    def __init__(self, why: str, *, unreadable: bool = False) -> None:
        super().__init__(why)
        self.unreadable = unreadable


# Is told, in the event loop, the reply to a frame, the JSON of its refusal, or that none can come any more.
Answered = Callable[[FrameReply | bytes | StreamLostError], None]


class StreamConnection(asyncio.BufferedProtocol):
    """One connection to one hop; made by :func:`dial`.

    ``boot`` is the boot id of who answers, ``served`` whether an answer has come; one that is ``retired`` is to be
    given no new frames, and closes once it owes no answers.
    """

    def __init__(self, head: bytes) -> None:
        self.boot = ""
        self.served = False
        self.retired = False
        self.used_at = 0.0
        self._head = head
        self._read = memoryview(bytearray(READ_BYTES))
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._answer = bytearray()  # to the upgrade
        self._messages: MessageBuffer | None = None  # once it is a stream
        self._pending: dict[int, Answered] = {}
        self._last = CONNECTION
        self._said = ""  # why the hop reads no more
        self._unreadable = False
        self._writable: asyncio.Future[None] | None = None

    @property
    def pending(self) -> int:
        """Frames that were sent and not answered."""
        return len(self._pending)

    async def opened(self) -> None:
        """Wait until the hop has agreed to speak the stream.

        Raises:
            NoStreamError: it answered something else.
            RateLimitedError: it was asked too much.
            StreamLostError: the connection ended.
        """
        await asyncio.shield(self._opened)  # data may still come for one whose dialling was given up

    async def exchange(self, frame: Frame, deadline_ms: int) -> FrameReply | bytes:
        """Send a frame; its reply, or the JSON of its refusal. Whoever is cancelled leaves the frame where it is.

        Raises:
            StreamLostError: the connection ended before the answer came.
        """
        while self._writable is not None:
            await asyncio.shield(self._writable)
        answer: asyncio.Future[FrameReply | bytes] = self._loop.create_future()
        request = self.send(frame, deadline_ms, partial(settle, answer))
        try:
            return await answer
        finally:
            self.forget(request)

    @property
    def ready(self) -> bool:
        """Whether it has served, is to serve on, and takes a frame at once."""
        return self.served and not self.retired and self._writable is None and self._transport is not None

    def send(self, frame: Frame, deadline_ms: int, answered: Answered) -> int:
        """Send a frame over a connection that is there; its request number. ``answered`` is told once what came.

        Raises:
            StreamLostError: the connection has ended.
        """
        if self._transport is None:
            raise StreamLostError(self._said or "the connection was closed")
        request = self._last = self._last % MAX_REQUEST + 1
        message = encode_frame(frame, request, deadline_ms)
        self._pending[request] = answered
        self._transport.write(message)
        self.used_at = self._loop.time()
        return request

    def forget(self, request: int) -> None:
        """Nobody waits for the answer to a frame any more, if it has not come. The frame is where it is."""
        if self._pending.pop(request, None) is not None:
            self._close_if_done()

    def retire(self) -> None:
        """Take no new frames."""
        self.retired = True
        self._close_if_done()

    def close(self) -> None:
        """End it at once; what is pending is lost."""
        self.retired = True
        self._end()

    # -- asyncio's side ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - of a stream socket
        self._transport = transport
        transport.write(self._head)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._read

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(self._read[:nbytes])

    def data_received(self, data: bytes | memoryview) -> None:
        if self._messages is None:
            self._answer += data
            if (rest := self._upgraded()) is None:
                return
            data = rest
        assert self._messages is not None  # noqa: S101 - for the type checker
        self._messages.feed(data)
        try:
            while (message := self._messages.take()) is not None:
                self._answered(*decode_answer(message, self.boot))
        except MeshnetError as error:
            self._said, self._unreadable = error.message, True
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.retired = True
        self._said = self._said or (f"the connection broke: {error}" if error else "the connection was closed")
        lost = StreamLostError(self._said, unreadable=self._unreadable)
        self.resume_writing()
        if not self._opened.done():
            self._opened.set_exception(lost)
            self._opened.exception()  # nobody may be waiting for it
        pending, self._pending = self._pending, {}
        for answered in pending.values():
            answered(lost)

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None:
            self._writable.set_result(None)
            self._writable = None

    # -- what came -----------------------------------------------------------------------------------------------------

    def _upgraded(self) -> bytes | None:
        """What follows the head of the hop's answer where it is a yes; None while that is not all there, or a no."""
        head, found, rest = bytes(self._answer).partition(b"\r\n\r\n")
        if not found and len(self._answer) < MAX_REFUSAL_BYTES:
            return None
        status, headers = _read_head(head)
        if status == 101 and headers.get("upgrade") == STREAM:
            self.boot = headers.get(BOOT.lower(), "")
            self._messages = MessageBuffer(MAX_REPLY_BYTES)
            self._answer.clear()
            self._opened.set_result(None)
            return rest
        length = headers.get("content-length", "0")
        wanted = int(length) if length.isascii() and length.isdigit() else 0
        if status == 429 and len(rest) < min(wanted, MAX_REFUSAL_BYTES):
            return None  # it says when to come again
        self._opened.set_exception(_no(status, rest))
        self.close()
        return None

    def _answered(self, request: int, answer: FrameReply | bytes) -> None:
        self.served = True
        if request == CONNECTION:
            said = error_from_wire(_document(answer), fallback=repr(answer)) if isinstance(answer, bytes) else ""
            self._said = f"the hop reads no more on it: {said}"
            self.retire()
            return
        answered = self._pending.pop(request, None)
        if answered is not None:
            answered(answer)
            self._close_if_done()
        elif request > self._last:
            raise HopFailedError(f"an answer to request {request}, which was not made")
        # Else whoever asked has left.

    def _close_if_done(self) -> None:
        if self.retired and not self._pending:
            self._end()

    def _end(self) -> None:
        """Nobody waits for an answer any more; what the hop has not taken in yet it might never."""
        if self._transport is not None:
            unsent = self._transport.get_write_buffer_size() > 0
            (self._transport.abort if unsent else self._transport.close)()


def _read_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    parts = first.split(" ", 2)
    status = int(parts[1]) if len(parts) > 1 and parts[1].isascii() and parts[1].isdigit() else 0
    pairs = (line.partition(":") for line in lines)
    return status if parts[0].startswith("HTTP/1.") else 0, {name.lower(): value.strip() for name, _, value in pairs}


def _no(status: int, body: bytes) -> Exception:
    error = error_from_wire(_document(body), fallback="")
    if status == 429 and isinstance(error, RateLimitedError):
        return error
    return NoStreamError(f"HTTP {status}")


def _document(body: bytes) -> object:
    try:
        return decode_json(body, "an error")
    except BadFrameError:  # a stranger's
        return None


async def dial(url: str, tls: ssl.SSLContext | None, connect_timeout_s: float) -> StreamConnection:
    """A new stream to the hop at ``url``; ``tls`` of None uses the system's authorities for https:// addresses.

    Raises:
        NoStreamError: what answers speaks no stream, or does not answer.
        RateLimitedError: it was asked too much.
        StreamLostError: it closed the connection.
        OSError: it cannot be reached.
        ValueError: ``url`` is no address.
    """
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{url!r} is no address")
    secure = parts.scheme == "https"
    head = (
        f"GET {parts.path.rstrip('/')}{PATH} HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\n"
        f"Connection: Upgrade\r\nUpgrade: {STREAM}\r\n\r\n"
    ).encode("ascii")
    context = (tls or ssl.create_default_context()) if secure else None
    connection: StreamConnection | None = None
    try:
        async with asyncio.timeout(connect_timeout_s + (HANDSHAKE_S if secure else 0)):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: StreamConnection(head), parts.hostname, parts.port or (443 if secure else 80), ssl=context
            )
    except TimeoutError as error:
        raise OSError("Connection timeout") from error
    try:
        async with asyncio.timeout(UPGRADE_S):
            await connection.opened()
    except TimeoutError as error:
        connection.close()
        raise NoStreamError(f"no answer to the upgrade within {UPGRADE_S:g} s") from error
    except BaseException:
        connection.close()
        raise
    return connection
