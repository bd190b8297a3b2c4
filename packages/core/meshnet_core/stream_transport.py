"""Reaches hops with frames over lean streams, and with all else over HTTP: a `HopTransport`.

A hop that speaks no stream gets its frames as HTTP posts too. What a stream carries is `stream_codec`'s.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from meshnet_core.clock import Clock
from meshnet_core.connection_words import connection_words
from meshnet_core.errors import DeadlineError, HopUnreachableError
from meshnet_core.frames import PROTOCOLS, Frame, FrameReply
from meshnet_core.hop_call import HopCall, Reuse
from meshnet_core.http_transport import CONNECT_TIMEOUT_S, KEEPALIVE_S, HttpTransport
from meshnet_core.open_document import OpenDocument, OpenReply, ProbeReply
from meshnet_core.prefix import Mark
from meshnet_core.settle import settle
from meshnet_core.stream_connection import NoStreamError, StreamConnection, StreamLostError, dial
from meshnet_core.stream_sending import StreamSending, lost_error, stream_call
from meshnet_core.transport import FrameAnswered
from meshnet_core.wire_form import WireForm

POSTS_S = 60.0  # how long a hop that spoke no stream is sent posts before it is asked again: it may be upgraded
# A decode step does not wait behind a chunk's megabytes: frames from this many bytes on have a connection of their own.
LARGE_BYTES = 64 * 1024
MAX_STREAMS = 1000


_Way = tuple[str, bool]  # which connection a frame takes: to which URL, and whether it is the one for large frames


class StreamTransport:
    """One or two connections to each hop; make it and close it in a running event loop.

    Args:
        http: for calls that are no frames, and for hops that speak no stream; closed with this transport.
        clock: for what is left of a deadline when a frame is sent again.
        connect_timeout_s: for making one connection, in seconds.
        tls: as `HttpTransport`'s.
    """

    def __init__(
        self,
        http: HttpTransport,
        clock: Clock,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._http = http
        self._clock = clock
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls
        self._streams: dict[_Way, StreamConnection] = {}
        self._dialled: dict[_Way, asyncio.Task[StreamConnection]] = {}
        self._retired: set[StreamConnection] = set()
        self._posts_until: dict[str, float] = {}
        self._closed = False
        self._idle: asyncio.TimerHandle | None = None

    async def open(self, url: str, document: OpenDocument) -> OpenReply:
        return await self._http.open(url, document)

    async def release(
        self, url: str, session: str, through_epoch: int | None = None, keep: tuple[Mark, ...] = ()
    ) -> int:
        return await self._http.release(url, session, through_epoch, keep)

    async def probe(self, url: str, session: str | None) -> ProbeReply:
        return await self._http.probe(url, session)

    async def forward(self, url: str, frame: Frame) -> FrameReply:
        if url in self._posts_until and self._clock.now() < self._posts_until[url]:
            return await self._http.forward(url, frame)
        answer: asyncio.Future[FrameReply] = asyncio.get_running_loop().create_future()
        forget = self.send(url, frame, partial(settle, answer))
        if forget is None:
            return await self._patiently(url, frame)
        try:
            return await answer
        finally:
            forget()

    def send(self, url: str, frame: Frame, answered: FrameAnswered) -> Callable[[], None] | None:
        """See `meshnet_core.transport.PromptTransport`: where a stream to the hop has served, and can be written on."""
        way = (url, len(frame.body) >= LARGE_BYTES)
        stream = self._streams.get(way)
        if stream is None or not stream.ready:
            return None
        return StreamSending(stream, url, frame, answered, self._patiently, lambda: self._was_in_vain(way)).forget

    async def _patiently(self, url: str, frame: Frame) -> FrameReply:
        """The reply to a frame, whatever comes before it: a connection made, or made again, or posts instead."""
        call = stream_call(url, frame)
        way = (url, len(frame.body) >= LARGE_BYTES)
        began = self._clock.now()

        async def attempt(left_s: float, reuse: Reuse) -> FrameReply:
            return await self._exchange(call, way, frame, left_s, reuse)

        try:
            return await call.persisted(self._clock, attempt)
        except NoStreamError:
            if len(self._posts_until) >= MAX_STREAMS:
                self._posts_until.clear()
            now = self._clock.now()
            self._posts_until[url] = now + POSTS_S
            left_ms = frame.deadline_ms - round(1000 * (now - began))
            return await self._http.forward(url, replace(frame, deadline_ms=max(1, left_ms)))
        except DeadlineError as error:
            if isinstance(error.__cause__, TimeoutError):
                self._was_in_vain(way)
            raise

    def _was_in_vain(self, way: _Way) -> None:
        """On a connection where one frame waited in vain others might too."""
        if way in self._streams:
            self._retire(self._streams.pop(way))

    async def close(self) -> None:
        """Close every connection; calls made later find no hop. Idempotent."""
        self._closed = True
        if self._idle is not None:
            self._idle.cancel()
        tasks = list(self._dialled.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in (*self._streams.values(), *self._retired):
            stream.close()
        self._streams.clear()
        await self._http.close()

    async def _exchange(self, call: HopCall, way: _Way, frame: Frame, left_s: float, reuse: Reuse) -> FrameReply:
        """One sending of a frame and its answer."""
        call.check_dialled(tls=self._tls)
        try:
            stream = self._streams.get(way)
            if stream is None or stream.retired:
                stream = await self._new_stream(call, way)
            reuse.connection = stream.served
            answer = await stream.exchange(frame, max(0, round(left_s * 1000)))
        except StreamLostError as error:
            raise lost_error(call, error) from error
        except (OSError, ValueError) as error:
            raise HopUnreachableError(
                f"{call} cannot be reached: {connection_words(error)}", hop_index=call.hop_index
            ) from error
        if isinstance(answer, bytes):
            raise call.refused(answer, stream.boot)
        return answer

    async def _new_stream(self, call: HopCall, way: _Way) -> StreamConnection:
        """A connection for ``way``, made once for all who ask meanwhile; one who leaves does not end it for others."""
        if self._closed:
            raise HopUnreachableError(f"{call} was called after this transport was closed", hop_index=call.hop_index)
        task = self._dialled.get(way)
        if task is None:
            task = self._dialled[way] = asyncio.create_task(dial(way[0], self._tls, self._connect_timeout_s))
            task.add_done_callback(lambda done: self._made(way, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not task.cancelled() or (caller is not None and caller.cancelling()):
                raise
            raise HopUnreachableError(f"{call}: this transport was closed", hop_index=call.hop_index) from None

    def _made(self, way: _Way, task: asyncio.Task[StreamConnection]) -> None:
        del self._dialled[way]
        if task.cancelled() or task.exception() is not None:
            return
        if self._closed:
            task.result().close()
            return
        if (before := self._streams.get(way)) is not None:
            self._retire(before)
        self._streams[way] = task.result()
        if self._idle is None:
            self._idle = asyncio.get_running_loop().call_later(KEEPALIVE_S / 2, self._close_idle)

    def _retire(self, stream: StreamConnection) -> None:
        stream.retire()
        self._retired = {one for one in self._retired if one.pending} | ({stream} if stream.pending else set())

    def _close_idle(self) -> None:
        loop = asyncio.get_running_loop()
        for way, stream in list(self._streams.items()):
            if stream.retired or (not stream.pending and loop.time() - stream.used_at >= KEEPALIVE_S):
                del self._streams[way]
                self._retire(stream)
        self._idle = loop.call_later(KEEPALIVE_S / 2, self._close_idle) if self._streams else None


WireTransport = HttpTransport | StreamTransport


def transport_for(
    form: WireForm, clock: Clock, *, protocols: range = PROTOCOLS, tls: ssl.SSLContext | None = None
) -> WireTransport:
    """What sends frames in ``form``, and all other calls over HTTP; arguments as `HttpTransport`'s."""
    http = HttpTransport(clock, protocols=protocols, tls=tls)
    return http if form is WireForm.HTTP else StreamTransport(http, clock, tls=tls)
