"""What a pool knows of one offered shard, and a session's hold on one that is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from meshnet_core.errors import CacheFullError, HopFailedError
    from meshnet_node.offered_shard import LoadedShard, OfferedShard


class ShardLease:
    """One session's hold on a loaded shard; the shard stays loaded until it ends."""

    def __init__(self, shard: LoadedShard, end: Callable[[], None]) -> None:
        self.shard = shard
        self._end: Callable[[], None] | None = end

    def end(self) -> None:
        """Let go of the shard; idempotent. Call it from the pool's event loop."""
        end, self._end = self._end, None
        if end is not None:
            end()


@dataclass(slots=True, eq=False)
class ShardPlace:
    """What the pool knows of one offered shard."""

    offer: OfferedShard
    leases: int = 0
    waiting: int = 0  # of those who ask for it
    fresh: bool = False  # nobody has leased it since it was loaded
    used: int = 0  # counts up: the higher, the more recently
    loaded_at: float = 0.0
    loading: asyncio.Task[None] | None = None
    progress: tuple[int, int] = (0, 1)
    failed: tuple[float, HopFailedError | CacheFullError] | None = None  # until when it is not tried again
    retired: bool = False  # no longer offered; goes when its last lease ends

    @property
    def is_idle(self) -> bool:
        """Whether it may be dropped: not while it is leased, nor before those for whom it was loaded have it."""
        droppable = self.offer.shard is not None and self.offer.load is not None
        return droppable and not self.leases and not (self.fresh and self.waiting)

    @property
    def is_wanted(self) -> bool:
        """Whether it is neither loaded nor on its way."""
        return self.offer.shard is None and self.loading is None
