"""The line of shards that wait to be loaded, and which loaded ones take no newcomers so that they become free.

Decides by what places tell; loads and drops nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshnet_core.clock import Clock
    from meshnet_node.shard_place import ShardPlace

IN_LINE_S = 5.0  # a place in line is kept for one who was refused; gateways come back within a few seconds
TURN_S = 5.0  # a shard that was loaded takes new sessions at least so long


class ShardLine:
    """Who waits for a shard to be dropped, first come first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: dict[ShardPlace, float] = {}

    def enter(self, place: ShardPlace) -> None:
        """Keep a place in line, or the one that it has."""
        self._until[place] = self._clock.now() + IN_LINE_S

    def leave(self, place: ShardPlace) -> None:
        self._until.pop(place, None)

    def before(self, place: ShardPlace) -> int:
        """How many shards are to be loaded before this one; all of them if it is not in line."""
        line = self._waiting()
        ahead = line[: line.index(place)] if place in line else line
        return sum(other is not place and other.is_wanted for other in ahead)

    def takes_sessions(self, place: ShardPlace, places: Sequence[ShardPlace], room: int) -> bool:
        """Whether a loaded shard takes a newcomer, or has to become free for one that waits in line.

        Args:
            place: the loaded shard's.
            places: of the pool.
            room: how many more shards may be loaded without dropping one.
        """
        if place.fresh or place.offer.load is None:
            return True
        waiting = sum(other.is_wanted for other in self._waiting())
        others_idle = sum(other.is_idle for other in places if other is not place)
        wanted = waiting - room - others_idle
        if wanted <= 0:
            return True
        due = self._clock.now() - TURN_S
        loaded = [other for other in places if other.offer.shard is not None and other.offer.load is not None]
        busy = [other for other in loaded if other is place or not other.is_idle]
        outgoing = sorted((p for p in busy if p.loaded_at <= due), key=lambda p: p.loaded_at)[:wanted]
        return place not in outgoing

    def _waiting(self) -> list[ShardPlace]:
        now = self._clock.now()
        self._until = {place: until for place, until in self._until.items() if until > now}
        return list(self._until)
