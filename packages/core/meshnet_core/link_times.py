"""How long posts to other nodes took, on real frames and probes: what a node tells of its links. Sends nothing itself.

post sent ──────────── elapsed ───────────> reply here
      └─ there ─ spent, as the other node says ─┘        round trip = elapsed - spent   (small bodies)
                                                         per MiB = (elapsed - spent - round trip) / body   (large)
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from meshnet_core.clock import Clock
from meshnet_core.estimate import Evidence, RunningEstimate
from meshnet_core.link_info import MAX_LINKS, MAX_MS, MIB, LinkInfo

SMALL_BYTES = 16 * 1024  # bodies up to here say what a round trip takes
LARGE_BYTES = 128 * 1024  # from here on what each byte adds stands out of the noise


@dataclass(slots=True)
class _Link:
    rtt_ms: RunningEstimate = field(default_factory=RunningEstimate)
    mib_ms: RunningEstimate = field(default_factory=RunningEstimate)


class LinkTimes:
    """Of the nodes that were sent to last; the longest unused link is forgotten first.

    Args:
        clock: tells how old a measurement is.
        most: links that are remembered.
    """

    def __init__(self, clock: Clock, most: int = MAX_LINKS) -> None:
        self._clock = clock
        self._most = most
        self._links: OrderedDict[str, _Link] = OrderedDict()

    def took(self, node_id: str, elapsed_ms: float, spent_ms: float, body_bytes: int = 0) -> None:
        """Take in one post to ``node_id``, of which the node itself spent ``spent_ms``.

        One that is answered sooner than it is said to have taken tells nothing: the reply was of an earlier run.
        """
        way_ms = elapsed_ms - spent_ms
        if not 0 <= way_ms <= MAX_MS:
            return
        now = self._clock.now()
        link = self._links.setdefault(node_id, _Link())
        self._links.move_to_end(node_id)
        if len(self._links) > self._most:
            self._links.popitem(last=False)
        if body_bytes <= SMALL_BYTES:
            link.rtt_ms.add(way_ms, now)
        elif body_bytes >= LARGE_BYTES and link.rtt_ms.value is not None:
            link.mib_ms.add(max(0.0, way_ms - link.rtt_ms.value) * MIB / body_bytes, now)

    def age_s(self, node_id: str) -> float:
        """Seconds since the round trip to a node was measured; infinite if it never was."""
        link = self._links.get(node_id)
        behind = None if link is None else link.rtt_ms.evidence(self._clock.now())
        return float("inf") if behind is None else behind.age_s

    def told(self) -> tuple[LinkInfo, ...]:
        """Every link whose round trip was measured, the one used last at the end."""
        now = self._clock.now()
        return tuple(
            LinkInfo(
                node_id,
                link.rtt_ms.value,
                link.rtt_ms.evidence(now) or Evidence(),
                link.mib_ms.value,
                link.mib_ms.evidence(now),
            )
            for node_id, link in self._links.items()
            if link.rtt_ms.value is not None
        )
