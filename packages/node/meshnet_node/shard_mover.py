"""Moves a node from the layers that it holds to those that the tracker wants it to hold, under running sessions.

    target ── load the new shard beside the old one ── announce it ── wait for the others ── retire the old ── drop it
                 (no memory for both: retire and drop the old one first)                       once its sessions ended

A retired shard is not announced, takes no part in new routes and runs its sessions to their end. Knows neither HTTP nor
what a shard is made of.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from meshnet_core.clock import Clock, SystemClock
from meshnet_core.errors import MeshnetError

if TYPE_CHECKING:
    from meshnet_core.layer_range import LayerRange
    from meshnet_core.placeable import Wish
    from meshnet_node.offered_shard import LoadedShard, OfferedShard
    from meshnet_node.shard_pool import ShardPool

RELEASE_S = 120.0  # how long the others are waited for before the old shard is retired all the same
FAILURE_HOLD_S = 60.0  # after a move that failed, wishes are not followed for so long
POLL_S = 0.25

logger = logging.getLogger(__name__)


class ShardMover:
    """Follows the tracker's wishes; use it from the pool's event loop.

    Args:
        shards: of the node, with one shard that is held now.
        target: its layers.
        make_offer: fetches what layers need and plans them; called in a thread, blocks.
        fits_beside: whether a shard fits into memory besides what is loaded.
        announce: tells the tracker how things are now; never fails.
        make_idle: ends idle sessions of a shard, as for `ShardPool.acquire`.
        clock, sleep: for waiting.

    Attributes:
        target: what is held or about to be; None where a move failed that had to drop the old shard first.
        moves, failures: how many there were.
    """

    def __init__(
        self,
        shards: ShardPool,
        target: LayerRange,
        *,
        make_offer: Callable[[LayerRange], OfferedShard],
        fits_beside: Callable[[OfferedShard], bool],
        announce: Callable[[], Awaitable[object]],
        make_idle: Callable[[LoadedShard], bool] = lambda shard: False,
        clock: Clock | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.target: LayerRange | None = target
        self.moves = self.failures = 0
        self._shards = shards
        self._make_offer = make_offer
        self._fits_beside = fits_beside
        self._announce = announce
        self._make_idle = make_idle
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._may_release = False
        self._hold_until = 0.0
        self._moving: asyncio.Task[None] | None = None
        self._dropping: asyncio.Task[None] | None = None

    @property
    def is_moving(self) -> bool:
        return self._moving is not None and not self._moving.done()

    def told(self, wish: Wish) -> None:
        """Take in what the tracker wants now; begins a move where that is something new and none is under way."""
        self._may_release = wish.may_release
        wants = wish.layers
        if wants is None or wants == self.target or self.is_moving or self._clock.now() < self._hold_until:
            return
        self._may_release = False  # that was said of the old target
        self._moving = asyncio.create_task(self._move(wants), name=f"move to layers {wants}")

    async def close(self) -> None:
        """Stop moving."""
        tasks = [task for task in (self._moving, self._dropping) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _move(self, layers: LayerRange) -> None:
        logger.info("moving from layers %s to %s", self.target, layers)
        before, self.target = self.target, layers
        await self._announce()
        old = list(self._shards)
        try:
            await self._load(layers, old)
        except MeshnetError as error:
            logger.warning("cannot move to layers %s: %s", layers, error.message)
            await self._stay(before)
            return
        except Exception as error:  # a loader raises what it likes
            logger.warning("cannot move to layers %s", layers, exc_info=error)
            await self._stay(before)
            return
        await self._announce()
        await self._others_ready()
        for offer in old:
            if offer.layers != layers:
                self._shards.retire(offer)
        self.moves += 1
        await self._announce()
        if self._dropping is None or self._dropping.done():
            self._dropping = asyncio.create_task(self._drop_retired(), name="drop retired shards")

    async def _stay(self, before: LayerRange | None) -> None:
        self.failures += 1
        self._hold_until = self._clock.now() + FAILURE_HOLD_S
        self.target = before if any(offer.layers == before for offer in self._shards) else None
        await self._announce()

    async def _load(self, layers: LayerRange, old: list[OfferedShard]) -> None:
        offer = await asyncio.to_thread(self._make_offer, layers)
        if not self._fits_beside(offer):
            logger.info("no memory for layers %s beside those that are loaded, so these go first", layers)
            for other in old:
                self._shards.retire(other)
            await self._announce()
            await self._drop_retired()
        await self._shards.add(offer)

    async def _others_ready(self) -> None:
        """Until the others serve what this node is to give up; not for ever, since they may be waiting for memory."""
        give_up = self._clock.now() + RELEASE_S
        while not self._may_release and self._clock.now() < give_up:
            await self._sleep(POLL_S)

    async def _drop_retired(self) -> None:
        while await self._shards.drop_retired(self._make_idle):
            await self._sleep(POLL_S)
