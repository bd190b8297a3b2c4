"""Room in a store of sessions: what is asked for, and who gives way for it. Pure: drops nothing itself.

A newcomer takes the room of those that are idle. Who grows takes that first, then that of the youngest that no frame
runs on, itself included: were it spared, two sessions could evict each other in turn, and neither would get on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, TypeVar


class Held(Protocol):
    """What the store holds for a session."""

    @property
    def nbytes(self) -> int:
        """Bytes in use now, state and buffered frames together."""
        ...

    def cancel(self) -> None:
        """Told once when the entry leaves the store; work under way should stop soon."""
        ...


class RoomAwaitedError(Exception):
    """A session cannot grow before frames of others have ended: of those that have left, or will give way to it."""


H = TypeVar("H", bound=Held)
STATELESS_BYTES = 256 * 2**20


class SessionKey(NamedTuple):  # it is looked up by often
    """One hop of one session; a node that serves two hops of a route holds two entries."""

    session: str
    hop_index: int


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds of a store.

    Attributes:
        budget_bytes: for all entries that keep state together.
        stateless_bytes: for all that keep none together; a single one may take more.
        max_sessions: entries at once.
        ttl_s: an entry unused for longer is dropped.
        running_s: an entry used within this time is running, and no newcomer takes its room; more for one whose
            steps may take longer.
        max_tombstones: how many departed sessions are remembered.
        max_prefixes: how many prefixes may be held on of sessions that are over; 0 holds none.
        prefix_ttl_s: one unused for longer is dropped.
    """

    budget_bytes: int
    stateless_bytes: int = STATELESS_BYTES
    max_sessions: int = 256
    ttl_s: float = 600.0
    running_s: float = 30.0
    max_tombstones: int = 4096
    max_prefixes: int = 0
    prefix_ttl_s: float = 3600.0


@dataclass(slots=True, eq=False)  # two entries are never the same for looking alike
class Entry(Generic[H]):
    """A session in the store."""

    session: str
    held: H
    epoch: int
    reserved: int
    # Counts up: the higher, the younger. A new epoch counts anew, and opens on all hops of its route at once, so that
    # they agree on who is younger; else two sessions could evict each other, each on another node.
    admission: int
    used_at: float
    running_s: float
    stateless: bool = False
    leases: int = 0

    @property
    def nbytes(self) -> int:
        """Room taken: what was set aside for it, or what it has grown to."""
        return max(self.reserved, self.held.nbytes)

    def is_running(self, now: float) -> bool:
        """Whether a frame runs on it, here or at another hop of its route."""
        return self.leases > 0 or now < self.used_at + self.running_s


@dataclass(frozen=True, slots=True)
class Wanted:
    """Room that is asked for beside what others of the same kind take, and how many sessions there would be.

    Without state the others are other sessions: at two hops of one route a session does not stand in its own way.
    """

    stateless: bool
    others: int
    needed: int
    count: int

    def fits(self, limits: StoreLimits) -> bool:
        """Whether there is room."""
        most = limits.stateless_bytes if self.stateless else limits.budget_bytes
        alone = self.stateless and not self.others  # the last resort, where nothing else is held for it
        return self.count <= limits.max_sessions and (alone or self.others + self.needed <= most)

    def without(self, nbytes: int) -> Wanted:
        """The same once one of the others has left."""
        return replace(self, others=self.others - nbytes, count=self.count - 1)


def idle_victims(
    entries: Mapping[SessionKey, Entry[H]], wanted: Wanted, limits: StoreLimits, now: float, spared: set[SessionKey]
) -> list[SessionKey] | None:
    """Idle entries to drop, in the order given, so that totals fit the limits; None if even all are too few."""
    victims: list[SessionKey] = []
    for key, entry in entries.items():
        if wanted.fits(limits):
            break
        gives_bytes = entry.stateless is wanted.stateless
        if key in spared or entry.is_running(now) or not (gives_bytes or wanted.count > limits.max_sessions):
            continue
        victims.append(key)
        wanted = wanted.without(entry.nbytes if gives_bytes else 0)
    return victims if wanted.fits(limits) else None


def youngest_to_yield(entries: Mapping[SessionKey, Entry[H]], grower: SessionKey, *, awaited: bool) -> SessionKey:
    """Who gives way to the growth of ``grower`` where nobody is idle; it may be the grower itself.

    Args:
        entries: of the store.
        grower: one of them.
        awaited: room will come free as soon as frames that run have ended.

    Raises:
        RoomAwaitedError: it had better wait: for that, or for the frames of those younger than itself.
    """
    entry = entries[grower]
    alike = {name: other for name, other in entries.items() if other.stateless is entry.stateless}
    free = [name for name, other in alike.items() if other is entry or not other.leases]
    youngest = max(free, key=lambda name: entries[name].admission)
    younger_run = any(other.leases and other.admission > entry.admission for other in alike.values())
    if awaited or (youngest == grower and younger_run):
        raise RoomAwaitedError
    return youngest
