"""Starts of nodes that are over for good, remembered for a while: what was under way when they ended brings none back.
Knows no lease.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshnet_core.clock import Clock
    from meshnet_core.membership import NodeInfo
    from meshnet_tracker.sightings import Goodbye


class Goodbyes:
    """Remembers them until their times are over, at most ``most``; the oldest are forgotten first."""

    def __init__(self, clock: Clock, most: int) -> None:
        self._clock = clock
        self._most = most
        self._until: dict[tuple[str, str, str | None], tuple[Goodbye, float]] = {}

    def remember(self, goodbye: Goodbye, until: float) -> Goodbye:
        """What is known of that start now: this goodbye, or one heard before that reaches further."""
        key = (goodbye.node_id, goodbye.boot, goodbye.owner)
        known = self._until.pop(key, None)
        if known is not None and _reach(known[0]) > _reach(goodbye):
            goodbye = known[0]
        self._until[key] = (goodbye, until)
        if len(self._until) > self._most:
            del self._until[next(iter(self._until))]
        return goodbye

    def cover(self, node: NodeInfo, owner: str | None) -> bool:
        """Whether the start that announces itself so is over."""
        goodbye, until = self._until.get((node.node_id, node.boot, owner), (None, 0.0))
        return goodbye is not None and until > self._clock.now() and goodbye.covers(node, owner)

    def left(self) -> list[tuple[Goodbye, float]]:
        """All, and for how many more seconds each is remembered."""
        now = self._clock.now()
        return [(goodbye, until - now) for goodbye, until in self._until.values() if until > now]

    def expire(self) -> None:
        """Forget those whose times are over."""
        now = self._clock.now()
        while self._until and next(iter(self._until.values()))[1] <= now:
            del self._until[next(iter(self._until))]


def _reach(goodbye: Goodbye) -> float:
    """Through which announcement a goodbye reaches."""
    return float("inf") if goodbye.through_beat is None else goodbye.through_beat
