"""The shards that a node offers, of which at most so many are loaded at once.

A session leases the shard that it runs on. One that is not loaded is loaded when it is asked for, in a thread, once for
all who wait for it; the least recently used one that nobody leases is dropped before. A leased shard is never dropped.
Where all are leased, who wants another one is refused and has a place in line for when it asks again: loaded shards
that were there longest take no more sessions meanwhile, and so become free, so that no shard is kept out by a stream of
newcomers to the others (`shard_line`). Knows sessions by their leases alone, and no tensors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from meshnet_core.clock import Clock, SystemClock
from meshnet_core.errors import CacheFullError, CacheMissError, HopFailedError, InvalidInputError, MissReason
from meshnet_core.layer_range import LayerRange
from meshnet_node.offered_shard import LoadedShard, OfferedShard
from meshnet_node.shard_line import ShardLine
from meshnet_node.shard_place import ShardLease, ShardPlace
from meshnet_node.shard_swaps import ShardSwaps
from meshnet_node.weights_memory import WeightsMemory, too_large

__all__ = ["LoadedShard", "OfferedShard", "ShardLease", "ShardPool"]


class ShardPool:
    """Not thread-safe: one event loop owns it, but for `load_first`, which runs before there is one.

    Args:
        shards: what the node offers; a `LoadedShard` is held for good.
        max_loaded: how many may be loaded at once; all of them if not given.
        clock: for places in line.
        free_bytes: memory that a shard may take now; not looked at if not given.
    """

    def __init__(
        self,
        shards: Iterable[OfferedShard | LoadedShard] = (),
        *,
        max_loaded: int | None = None,
        clock: Clock | None = None,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        offers = [OfferedShard.held(shard) if isinstance(shard, LoadedShard) else shard for shard in shards]
        self.max_loaded = len(offers) if max_loaded is None else max_loaded
        self._places = [ShardPlace(offer) for offer in offers]
        self._clock = clock or SystemClock()
        self._memory = WeightsMemory(free_bytes)
        self._line = ShardLine(self._clock)
        self._swaps = ShardSwaps(self._places, self._memory, self._clock)
        held = sum(offer.load is None for offer in offers)
        if offers and self.max_loaded < max(1, held + (held < len(offers))):
            raise InvalidInputError(f"{self.max_loaded} loaded shards are too few; the node needs at least 1")

    def __iter__(self) -> Iterator[OfferedShard]:
        """What is offered, loaded or not."""
        return iter([place.offer for place in self._places if not place.retired])

    @property
    def loaded(self) -> int:
        """How many shards are in memory, or on their way there."""
        return sum(place.offer.shard is not None or place.loading is not None for place in self._places)

    @property
    def _room(self) -> int:
        """How many more may be loaded without dropping one."""
        return self.max_loaded - self.loaded

    @property
    def loaded_bytes(self) -> int:
        """Of weights in memory, of shards that were retired too."""
        return sum(place.offer.weight_bytes for place in self._places if place.offer.shard is not None)

    @property
    def loads(self) -> int:
        """How many shards were loaded."""
        return self._swaps.loads

    @property
    def drops(self) -> int:
        """How many gave their place to others, or were retired."""
        return self._swaps.drops

    @property
    def leases(self) -> int:
        """Leases that have not ended, on all shards together."""
        return sum(place.leases for place in self._places)

    @property
    def bytes_to_come(self) -> int:
        """Bytes of weights by which the largest shards that may be loaded together exceed those that are loaded."""
        largest = sorted((place.offer.weight_bytes for place in self._places), reverse=True)[: self.max_loaded]
        held = sum(place.offer.weight_bytes for place in self._places if place.offer.shard is not None)
        return max(0, sum(largest) - held)

    def load_first(self, progress: Callable[[OfferedShard, int, int], None]) -> None:
        """Load as many shards as may be loaded, in the order given; blocks. For the start of a node.

        Raises:
            InvalidInputError: the largest shards that may be loaded together do not fit into memory.
            Exception: whatever a loader raises.
        """
        self._check_fits()
        for place in self._places[: self.max_loaded]:
            self._swaps.load_first(place, progress)

    def find(self, fingerprint: str, layers: LayerRange) -> OfferedShard:
        """The shard whose end is ``layers``' end and that holds its start; of several a loaded one, then the smallest.

        Raises:
            CacheMissError: no shard of that model here, or none with that range.
        """
        return self._find(fingerprint, layers).offer

    def count(self, fingerprint: str, ranges: Iterable[LayerRange]) -> int:
        """How many different shards `find` gives for these ranges; what is not here is passed over."""
        found = set()
        for layers in ranges:
            with suppress(CacheMissError):
                found.add(self._find(fingerprint, layers))
        return len(found)

    async def acquire(
        self,
        fingerprint: str,
        layers: LayerRange,
        *,
        wait_s: float,
        make_idle: Callable[[LoadedShard], bool] = lambda shard: False,
        in_use: bool = False,
    ) -> ShardLease:
        """A lease on the shard for ``layers``, which is loaded first if it is not.

        Args:
            fingerprint, layers: see `find`.
            wait_s: how long to wait for it to be loaded.
            make_idle: asked, where all loaded shards are leased, to end the leases of one; says whether it did.
            in_use: the session runs on that shard already, and need not get in line.

        Raises:
            CacheMissError: see `find`.
            CacheFullError: not loaded in time, or all loaded shards are in use.
            HopFailedError: it could not be loaded.
        """
        place = self._find(fingerprint, layers)
        give_up = self._clock.now() + wait_s
        place.waiting += 1
        try:
            while place.offer.shard is None or not (
                in_use or self._line.takes_sessions(place, self._places, self._room)
            ):
                if place.is_wanted:
                    self._swaps.check_not_failed(place)
                    self._begin_to_load(place, make_idle)
                if place.loading is None:
                    self._line.enter(place)
                    raise CacheFullError(
                        f"{place.offer} has to wait: all of the {self.max_loaded} shards that this node loads at once "
                        "are in use"
                    )
                await asyncio.wait([place.loading], timeout=max(0.0, give_up - self._clock.now()))
                if place.loading is not None:
                    done, total = place.progress
                    raise CacheFullError(
                        f"{place.offer} is still being loaded, {100 * done // max(1, total)} % so far; try again"
                    )
        finally:
            place.waiting -= 1
        return self._lease(place, place.offer.shard)

    # -- other shards than at the start --------------------------------------------------------------------------------

    async def add(self, offer: OfferedShard) -> None:
        """Load one more shard and offer it, beside those that are there. One that was retired is offered again.

        Raises:
            CacheFullError, HopFailedError: it could not be loaded; nothing has changed.
        """
        for place in self._places:
            if (place.offer.known.fingerprint, place.offer.layers) == (offer.known.fingerprint, offer.layers):
                place.retired = False
                return
        place = ShardPlace(offer, retired=True)  # until it is loaded
        self._places.append(place)
        self.max_loaded += 1
        await asyncio.shield(self._swaps.begin(place))
        if offer.shard is not None:
            place.retired = False
            return
        self._places.remove(place)
        self.max_loaded -= 1
        raise place.failed[1] if place.failed is not None else HopFailedError(f"{offer} was not loaded")

    def retire(self, offer: OfferedShard) -> None:
        """Offer it no longer. Sessions that have it, or whose route was made before, may use it until it is dropped."""
        for place in self._places:
            place.retired = place.retired or place.offer is offer

    async def drop_retired(self, make_idle: Callable[[LoadedShard], bool] = lambda shard: False) -> int:
        """Drop the retired shards that nobody leases; ``make_idle`` as for `acquire`. Returns how many are left."""
        for place in [place for place in self._places if place.retired and place.loading is None]:
            shard = place.offer.shard
            if shard is not None and place.leases:
                make_idle(shard)
            if place.leases or place.waiting:
                continue
            self._places.remove(place)
            self.max_loaded -= 1
            if shard is not None:
                await self._swaps.drop(place)
        return sum(place.retired for place in self._places)

    async def close(self) -> None:
        """Stop what is being loaded."""
        await self._swaps.close()

    # -- leases -------------------------------------------------------------------------------------------------------

    def _lease(self, place: ShardPlace, shard: LoadedShard) -> ShardLease:
        self._line.leave(place)
        place.leases += 1
        place.fresh = False
        self._swaps.used(place)

        def end() -> None:
            place.leases -= 1
            self._swaps.used(place)

        return ShardLease(shard, end)

    def _find(self, fingerprint: str, layers: LayerRange) -> ShardPlace:
        same_model = [place for place in self._places if place.offer.known.fingerprint == fingerprint]
        if not same_model:
            raise CacheMissError(
                f"no shard of the model with fingerprint {fingerprint[:12]} is served here",
                reason=MissReason.MODEL_MISMATCH,
            )
        fit = [p for p in same_model if p.offer.layers.stop == layers.stop and layers.start in p.offer.layers]
        if not fit:
            held_ranges = ", ".join(str(place.offer.layers) for place in same_model)
            raise CacheMissError(
                f"layers {layers} asked for, {held_ranges} held; a hop runs from its start to a shard's end",
                reason=MissReason.RANGE_MISMATCH,
            )
        return min(fit, key=lambda place: (place.retired, place.offer.shard is None, len(place.offer.layers)))

    # -- loading ------------------------------------------------------------------------------------------------------

    def _begin_to_load(self, place: ShardPlace, make_idle: Callable[[LoadedShard], bool]) -> None:
        """Start to load it if it is its turn and there is a place for it, if need be that of an idle one."""
        before = self._line.before(place)
        needed = before + 1 - self._room
        if needed > 0 and not before:
            self._make_idle(needed, make_idle)
        idle = sorted((p for p in self._places if p.is_idle), key=lambda p: p.used)
        if needed > len(idle) or self._swaps.closed:
            return
        victims = idle[: max(0, 1 - self._room)]
        self._line.leave(place)
        self._swaps.begin(place, victims)

    def _make_idle(self, needed: int, make_idle: Callable[[LoadedShard], bool]) -> None:
        for place in sorted(self._places, key=lambda p: p.used):
            if sum(p.is_idle for p in self._places) >= needed:
                return
            if place.leases and place.offer.load is not None and place.offer.shard is not None:
                make_idle(place.offer.shard)

    def _check_fits(self) -> None:
        needs = self.bytes_to_come
        if (free := self._memory.short(needs)) is None:
            return
        remedy = "Give fewer layers, or --dtype bfloat16 where they are wider"
        if min(self.max_loaded, len(self._places)) > 1:
            remedy += f", or --max-loaded-shards {min(self.max_loaded, len(self._places)) - 1}"
        raise too_large(needs, free, remedy)
