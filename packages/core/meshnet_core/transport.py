"""How sessions reach hops: the port that the gateway and the nodes are given. HTTP and in-process ones implement it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol, runtime_checkable

from meshnet_core.errors import DeadlineError, HopUnreachableError
from meshnet_core.frames import Frame, FrameReply
from meshnet_core.open_document import OpenDocument, OpenReply, ProbeReply
from meshnet_core.prefix import Mark


class HopEndpoint(Protocol):
    """What one node answers; every refusal is a `meshnet_core.errors.MeshnetError`."""

    async def open(self, document: OpenDocument) -> OpenReply: ...

    async def forward(self, frame: Frame) -> FrameReply: ...

    async def release(self, session: str, through_epoch: int | None = None, keep: tuple[Mark, ...] = ()) -> int:
        """Free the session; idempotent. Returns how many of its entries were held (0 on a repeat).

        With ``through_epoch`` only epochs up to that one are over: a hop that a reroute left, or whose open was undone,
        can still be opened for a newer one. With ``keep``, marks of its token ids beyond the prefill, its state is held
        on as a prefix for later sessions, where it stands at one of them or can be cut back to one.
        """
        ...

    async def probe(self, session: str | None) -> ProbeReply: ...


class HopTransport(Protocol):
    """Reaches the endpoint at a URL.

    Every method raises `HopUnreachableError` where nothing answers, `DeadlineError` where the answer did not come in
    time, and otherwise what the endpoint raised.
    """

    async def open(self, url: str, document: OpenDocument) -> OpenReply: ...

    async def forward(self, url: str, frame: Frame) -> FrameReply: ...

    async def release(
        self, url: str, session: str, through_epoch: int | None = None, keep: tuple[Mark, ...] = ()
    ) -> int: ...

    async def probe(self, url: str, session: str | None) -> ProbeReply: ...


FrameAnswered = Callable[[FrameReply | Exception], None]
"""Is told, in the event loop, the reply to a frame or why there is none."""


@runtime_checkable
class PromptEndpoint(HopEndpoint, Protocol):
    """An endpoint that can begin on a frame at once, where nothing stands against it."""

    def begin(self, frame: Frame, answered: FrameAnswered) -> bool:
        """Begin on a frame, if that needs no waiting and nothing is wrong with it; whether that was so.

        As `forward` but without a task, which costs a decode step more than it needs: ``answered`` is told once what
        `forward` would return or raise. Where it is False nothing has changed, and `forward` is to be asked.
        """
        ...


@runtime_checkable
class PromptTransport(HopTransport, Protocol):
    """A transport that can send a frame at once, where a connection is there."""

    def send(self, url: str, frame: Frame, answered: FrameAnswered) -> Callable[[], None] | None:
        """Send a frame, if that needs no waiting; None where it does, and `forward` is to be asked.

        ``answered`` is told once what `forward` would return or raise, unless what is returned here was called before:
        then nobody waits for the answer any more.
        """
        ...


class InProcessTransport:
    """Endpoints in this process, by URL: no sockets, the same frames. Most tests use it."""

    def __init__(self) -> None:
        self.endpoints: dict[str, HopEndpoint] = {}

    def _endpoint(self, url: str, hop_index: int | None = None) -> HopEndpoint:
        try:
            return self.endpoints[url]
        except KeyError:
            raise HopUnreachableError(f"nothing answers at {url}", hop_index=hop_index) from None

    async def open(self, url: str, document: OpenDocument) -> OpenReply:
        async with _within(document.step_deadline_ms, url, document.hop_index):
            return await self._endpoint(url, document.hop_index).open(document)

    async def forward(self, url: str, frame: Frame) -> FrameReply:
        async with _within(frame.deadline_ms, url, frame.hop_index):
            return await self._endpoint(url, frame.hop_index).forward(frame)

    async def release(
        self, url: str, session: str, through_epoch: int | None = None, keep: tuple[Mark, ...] = ()
    ) -> int:
        return await self._endpoint(url).release(session, through_epoch, keep)

    async def probe(self, url: str, session: str | None) -> ProbeReply:
        return await self._endpoint(url).probe(session)


@asynccontextmanager
async def _within(deadline_ms: int, url: str, hop_index: int) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(deadline_ms / 1000):
            yield
    except TimeoutError as error:
        raise DeadlineError(
            f"hop {hop_index}, {url} did not answer within {deadline_ms / 1000:g} s", hop_index=hop_index
        ) from error
