"""Nodes under leases, each over at its own moment. Knows no rule of who may hold one, and tells nobody what becomes of
it.

A heap has one entry or more for each lease, of a moment that is never later than its end; entries that their leases do
not know are stale. So a renewal costs nothing, and what is over is found without looking at the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshnet_core.clock import Clock
    from meshnet_core.membership import NodeInfo

MAX_HOLD_S = 600.0  # see `Leases.hold`


@dataclass(slots=True)
class Lease:
    """One node's.

    Attributes:
        node: as it announced itself last.
        heard_at: when that was.
        owner: of the certificate that leased it, where there are certificates.
        relayed: heard of last through another tracker.
        due: of its newest entry in the heap.
        routed: routes through the node since then, which its own count of sessions cannot show yet.
    """

    node: NodeInfo
    heard_at: float
    owner: str | None = None
    relayed: bool = False
    due: float = 0.0
    routed: int = 0


class Leases:
    """By node id, in the order in which they began: one is over ``lease_s`` seconds after its node was heard of."""

    def __init__(self, clock: Clock, lease_s: float) -> None:
        self.lease_s = lease_s
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self._due: list[tuple[float, str]] = []
        self._held_until: float | None = None

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def __getitem__(self, node_id: str) -> Lease:
        return self._leases[node_id]

    def get(self, node_id: str) -> Lease | None:
        return self._leases.get(node_id)

    def begin(self, lease: Lease) -> None:
        """A node that has none gets one."""
        self._leases[lease.node.node_id] = lease
        self._schedule(lease)

    def renewed(self, lease: Lease) -> None:
        """It was changed; where it ends earlier than it did, that is noticed in time."""
        if self._ends_at(lease) < lease.due:
            self._schedule(lease)

    def end(self, lease: Lease) -> None:
        """It ends now."""
        del self._leases[lease.node.node_id]

    def over(self) -> Iterator[Lease]:
        """Those that are over by now, one after the other as they are asked for; they are gone."""
        now = self._clock.now()
        while self._due and self._due[0][0] <= now:
            due, node_id = heapq.heappop(self._due)
            lease = self._leases.get(node_id)
            if lease is None or lease.due != due:
                continue  # of a lease that is gone, or that has an earlier entry
            if self._ends_at(lease) > now:
                self._schedule(lease)
                continue
            self.end(lease)
            yield lease

    def hold(self) -> None:
        """From now on nothing is heard through other trackers: leases of nodes that only they heard of last on
        meanwhile, at most `MAX_HOLD_S`, since their silence says nothing."""
        if self._held_until is None:
            self._held_until = self._clock.now() + MAX_HOLD_S

    def release(self) -> None:
        """Other trackers are heard again: what was held has one more lease."""
        if self._held_until is None:
            return
        self._held_until, now = None, self._clock.now()
        for lease in self:
            if lease.relayed:
                lease.heard_at = max(lease.heard_at, now)
            self.renewed(lease)

    def _ends_at(self, lease: Lease) -> float:
        """When a lease is over, if nothing more is heard."""
        ends_at = lease.heard_at + self.lease_s
        return max(ends_at, self._held_until) if lease.relayed and self._held_until is not None else ends_at

    def _schedule(self, lease: Lease) -> None:
        lease.due = self._ends_at(lease)
        heapq.heappush(self._due, (lease.due, lease.node.node_id))
