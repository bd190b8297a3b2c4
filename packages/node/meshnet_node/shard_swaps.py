"""Shards on their way into memory and out of it, one at a time, so that what is free is known.

Knows no sessions, and not which shard is to be there: `shard_pool` decides that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from meshnet_core.errors import CacheFullError, HopFailedError
from meshnet_node.weights_memory import WeightsMemory, size, taken, too_large

if TYPE_CHECKING:
    from meshnet_core.clock import Clock
    from meshnet_node.offered_shard import LoadedShard, OfferedShard
    from meshnet_node.shard_place import ShardPlace

logger = logging.getLogger(__name__)

FAILURE_HOLD_S = 10.0  # what could not be loaded is not tried again, at the cost of others, before this is over
MEMORY_HOLD_S = 0.5  # likewise, where memory was short because of others


class ShardSwaps:
    """Not thread-safe, as the pool is not; `load_first` is for before there is an event loop.

    Args:
        places: of the pool, which adds to them and removes from them.
        memory: for weights.
        clock: for how long a failure holds.

    Attributes:
        loads, drops: how many there were.
        closed: nothing more is loaded.
    """

    def __init__(self, places: Sequence[ShardPlace], memory: WeightsMemory, clock: Clock) -> None:
        self.loads = self.drops = 0
        self.closed = False
        self._places = places
        self._memory = memory
        self._clock = clock
        self._uses = 0
        self._one_at_a_time = asyncio.Lock()

    def used(self, place: ShardPlace) -> None:
        """It is the most recently used one now."""
        self._uses += 1
        place.used = self._uses

    def load_first(self, place: ShardPlace, progress: Callable[[OfferedShard, int, int], None]) -> None:
        """Load it if it is not; blocks.

        Raises:
            Exception: whatever its loader raises.
        """
        offer = place.offer
        if offer.shard is None and offer.load is not None:
            progress(offer, 0, 1)
            self._loaded(place, offer.loaded_with(offer.load(partial(progress, offer))))

    def begin(self, place: ShardPlace, victims: Sequence[ShardPlace] = ()) -> asyncio.Task[None]:
        """Drop the victims' shards, then load this one, in a task; `ShardPlace.failed` tells if it could not be."""
        dropped = [self._take_out(victim) for victim in victims]
        place.progress = (0, 1)
        place.loading = asyncio.create_task(self._swap(dropped, place), name=f"load {place.offer}")
        return place.loading

    async def drop(self, place: ShardPlace) -> None:
        """Free its shard, which is loaded."""
        await asyncio.to_thread(self._take_out(place).backend.close)

    def check_not_failed(self, place: ShardPlace) -> None:
        """Raises what it failed with, for as long as that holds: `HopFailedError` or `CacheFullError`."""
        if place.failed is None:
            return
        until, error = place.failed
        if self._clock.now() > until:
            place.failed = None
            return
        raise type(error)(error.message)

    async def close(self) -> None:
        """Stop what is being loaded."""
        self.closed = True
        tasks = [place.loading for place in self._places if place.loading is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _swap(self, dropped: list[LoadedShard], place: ShardPlace) -> None:
        """Free what was dropped, then load; one at a time, so that what is free is known."""
        offer = place.offer
        try:
            async with self._one_at_a_time:
                for shard in dropped:
                    await asyncio.to_thread(shard.backend.close)
                await self._fit(place)
                shard = await asyncio.to_thread(self._load, place)
            self._loaded(place, shard)
        except CacheFullError as error:
            place.failed = (self._clock.now() + MEMORY_HOLD_S, error)
        except Exception as error:  # a loader raises what it likes; whoever waits is told
            logger.warning("%s could not be loaded", offer, exc_info=error)
            reason = str(error) or type(error).__name__
            place.failed = (
                self._clock.now() + FAILURE_HOLD_S,
                HopFailedError(f"{offer} could not be loaded: {reason}"),
            )
        finally:
            place.loading = None

    def _load(self, place: ShardPlace) -> LoadedShard:
        """Runs in a thread."""
        offer = place.offer
        if offer.load is None:
            raise RuntimeError(f"{offer} is held for good and has no loader")

        def look(done: int, total: int) -> None:
            if self.closed:
                raise RuntimeError("the node is closing")
            place.progress = (done, total)

        began = time.perf_counter()
        logger.info("loading %s", offer)
        backend = offer.load(look)
        logger.info("loaded %s in %.1f s, %s", offer, time.perf_counter() - began, size(backend.weight_bytes))
        return offer.loaded_with(backend)

    def _loaded(self, place: ShardPlace, shard: LoadedShard) -> None:
        place.offer.shard = shard
        place.failed = None
        place.loaded_at = self._clock.now()
        place.fresh = True
        self.loads += 1
        self.used(place)

    def _take_out(self, place: ShardPlace) -> LoadedShard:
        shard = place.offer.shard
        if shard is None:
            raise RuntimeError(f"{place.offer} is not loaded")
        logger.info("dropping %s", place.offer)
        place.offer.shard = None
        self.drops += 1
        return shard

    async def _fit(self, place: ShardPlace) -> None:
        """Make sure that there is memory: idle shards give way, though their number would be allowed."""
        needs = place.offer.weight_bytes
        while (free := self._memory.short(needs)) is not None:
            loaded = [other for other in self._places if other.offer.shard is not None]
            if idle := [other for other in loaded if other.is_idle]:
                await self.drop(min(idle, key=lambda p: p.used))
            elif loaded:
                raise taken(place.offer, needs, free)
            else:
                raise too_large(needs, free, "Serve fewer layers, or free memory")
