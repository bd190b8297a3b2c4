"""One generation's calls to its hops other than frames: open on all or on none, probe, and release whatever was left.

Knows which hops may hold something of the session and who opened it there; what is sent when is `generation`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from meshnet_core.errors import (
    CacheFullError,
    CacheMissError,
    DeadlineError,
    HopUnreachableError,
    MeshnetError,
    MissReason,
)
from meshnet_core.open_document import OpenDocument, OpenReply
from meshnet_core.prefix import Mark
from meshnet_core.route import Route
from meshnet_core.transport import HopTransport
from meshnet_gateway.recovery import Probed

logger = logging.getLogger(__name__)

OPEN_WAITS_S = (0.0, 0.1)  # before each try: one connection that breaks is no reason to blame a node
RELEASE_TIMEOUT_S = 5.0
RELEASE_WAITS_S = (0.0, 0.1, 0.3)  # before each try: a connection may break under a release too
PROBE_TIMEOUT_S = 1.0  # a probe takes no turn on a node's lane; one that does not answer it is hung or gone


class StayedError(Exception):
    """A session could not be moved, and is where it was."""


class HopCalls:
    """The calls of one session.

    Args:
        session: its id.
        transport: reaches the hops.
        sleep: waits, in seconds, before another try.
    """

    def __init__(self, session: str, transport: HopTransport, sleep: Callable[[float], Awaitable[None]]) -> None:
        self.session = session
        self._transport = transport
        self._sleep = sleep
        self._boots: dict[str, str] = {}  # by node: who opened the newest epoch
        self._urls: set[str] = set()  # of every hop that may hold something of this session
        self._leaving: set[asyncio.Task[None]] = set()  # releases that nobody waits for yet

    async def open(self, whole: OpenDocument, indices: Sequence[int] | None = None) -> list[OpenReply]:
        """Open on all hops at once, or on some; where one refuses, what the others set aside is freed again.

        Raises:
            MeshnetError: the least hopeful of the refusals.
        """
        indices = range(len(whole.route.hops)) if indices is None else indices
        hops = [whole.route.hops[index] for index in indices]
        self._urls.update(hop.url for hop in hops)
        opens = (self._open_at(hop.url, whole.for_hop(index)) for index, hop in zip(indices, hops, strict=True))
        replies = await asyncio.gather(*opens, return_exceptions=True)
        errors = [reply for reply in replies if isinstance(reply, BaseException)]
        if errors:
            answered = zip(hops, replies, strict=True)
            silent = {hop.url for hop, reply in answered if isinstance(reply, DeadlineError | HopUnreachableError)}
            self._release_behind(silent, whole.epoch)
            await self._release({hop.url for hop in hops} - silent, through_epoch=whole.epoch)
            raise min(errors, key=_hopefulness)
        opened = [reply for reply in replies if isinstance(reply, OpenReply)]
        self._boots |= {hop.node_id: reply.boot for hop, reply in zip(hops, opened, strict=True)}
        return opened

    async def _open_at(self, url: str, document: OpenDocument) -> OpenReply:
        """Open on one hop, once more where the connection broke: the same terms again get the same answer."""
        for wait_s in OPEN_WAITS_S[:-1]:
            await self._sleep(wait_s)
            with suppress(HopUnreachableError):
                return await self._transport.open(url, document)
        await self._sleep(OPEN_WAITS_S[-1])
        return await self._transport.open(url, document)

    async def open_beside(self, whole: OpenDocument, held: Route, within_s: float) -> list[OpenReply]:
        """Open a newer epoch on ``whole``'s route while the session goes on on another.

        First where it has nothing yet: should one of those refuse, or not answer within ``within_s`` seconds, nothing
        has changed. Then where it has; there the epoch before ends and its room serves the new one.

        Raises:
            StayedError: nothing has changed.
            MeshnetError: a refusal after that; the session has no place any more.
        """
        urls = {hop.url for hop in held.hops}
        new = [index for index, hop in enumerate(whole.route.hops) if hop.url not in urls]
        both = [index for index, hop in enumerate(whole.route.hops) if hop.url in urls]
        try:
            async with asyncio.timeout(within_s):
                opened = dict(zip(new, await self.open(whole, new), strict=True))
        except (MeshnetError, TimeoutError) as error:
            self._release_behind({whole.route.hops[index].url for index in new}, whole.epoch)
            raise StayedError(f"{error}" or f"not all opened within {within_s:g} s") from error
        opened |= zip(both, await self.open(whole, both), strict=True)
        return [opened[index] for index in range(len(opened))]

    async def probed(self, url: str) -> Probed:
        """What the node says of itself."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                reply = await self._transport.probe(url, self.session)
        except (MeshnetError, TimeoutError):
            return Probed.GONE
        return Probed.BUSY if reply.queued > 0 else Probed.IDLE

    def tell_restart(self, failure: MeshnetError, node_id: str | None) -> None:
        """A node that knows nothing of the session, and is another process than the one that opened it, restarted."""
        if isinstance(failure, CacheMissError) and failure.reason is MissReason.UNKNOWN_SESSION:
            opened_by = self._boots.get(node_id or "")
            if opened_by is not None and failure.boot is not None and failure.boot != opened_by:
                failure.reason = MissReason.RESTARTED

    def leave_hops_outside(self, route: Route, epoch: int) -> None:
        """Free what hops of routes before ``epoch`` hold that are not on ``route``."""
        left = self._urls - {hop.url for hop in route.hops}
        self._urls -= left
        self._release_behind(left, epoch - 1)

    def let_go(self, through_epoch: int) -> None:
        """Free what every hop holds up to an epoch, without waiting for it."""
        self._release_behind(set(self._urls), through_epoch)

    async def give_back(self, keep: tuple[Mark, ...] = ()) -> None:
        """Free the session on every hop, for good; what it leaves may be held on under ``keep``. Idempotent."""
        urls, self._urls = self._urls, set()
        await asyncio.gather(self._release(urls, keep=keep), *self._leaving)

    def _release_behind(self, urls: set[str], through_epoch: int) -> None:
        """Release without waiting: a hop that hangs must not hold up the answer."""
        if urls:
            task = asyncio.create_task(self._release(urls, through_epoch))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _release(self, urls: set[str], through_epoch: int | None = None, keep: tuple[Mark, ...] = ()) -> None:
        async def one(url: str) -> None:
            for wait_s in RELEASE_WAITS_S:
                await self._sleep(wait_s)
                try:
                    async with asyncio.timeout(RELEASE_TIMEOUT_S):
                        await self._transport.release(url, self.session, through_epoch, keep)
                        return
                except (MeshnetError, TimeoutError) as error:
                    # A node that is gone holds nothing; one that cannot be reached frees it by its time to live.
                    logger.info(
                        "session %s: no release at %s: %s", self.session, url, error, extra={"session": self.session}
                    )
                    if not isinstance(error, HopUnreachableError):
                        return

        await asyncio.gather(*(one(url) for url in urls))


def _hopefulness(error: BaseException) -> int:
    """Of the refusals of several hops the least hopeful counts: to wait for room is of use if nothing else is wrong."""
    return 0 if not isinstance(error, CacheFullError) else 1 if error.never else 2
