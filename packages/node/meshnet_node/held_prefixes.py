"""What a node holds on of sessions that are over: their state, under the hashes of the tokens that it has taken in.

Knows no tensors, no sessions and no budget; the `CacheStore`, which has the budget, says how much must go. What is held
is never changed: who begins from it takes a copy.

    held state   [ system prompt | question | answer ]
    marks                        ^          ^        ^     all of them where it can be cut back, else the last alone
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from meshnet_core.clock import Clock
from meshnet_core.dtypes import computed_in
from meshnet_core.layer_range import LayerRange
from meshnet_core.open_document import OpenDocument
from meshnet_core.prefix import Mark

KEY_NBYTES = 256  # a mark's key of 32 letters, its position, and their place in a table


class Sized(Protocol):
    """What is held."""

    @property
    def nbytes(self) -> int: ...


S = TypeVar("S", bound=Sized)


class PrefixKind(NamedTuple):
    """What must be the same besides the tokens, so that one session can go on from another's state.

    Attributes:
        scope: whose it is.
        fingerprint: of the model.
        layers: from the effective start to where the hop stops.
        computed: the wire's dtype, then (first layer, dtype) of the hops up to this one whose dtype is another or that
            follow one of another: to what, and where, hidden states were rounded on their way.
    """

    scope: str
    fingerprint: str
    layers: LayerRange
    computed: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, document: OpenDocument, scope: str) -> PrefixKind:
        """That of a session at the hop that ``document`` is for."""
        wire, hops = document.wire_dtype, document.route.hops[: document.hop_index + 1]
        runs = [(-1, wire)]
        for hop in hops:
            # Between hops that compute in the wire's own dtype nothing is rounded, however their weights are held.
            if hop.dtype != runs[-1][1] or computed_in(hop.dtype) != wire:
                runs.append((hop.layers.start, hop.dtype))
        return cls(scope, document.route.fingerprint, document.hop.layers, tuple(runs))


def prefix_nbytes(state: Sized, positions: Mapping[str, int]) -> int:
    """Bytes that a prefix takes: of its state, and of the keys under which it is found."""
    return state.nbytes + KEY_NBYTES * len(positions)


@dataclass(slots=True, eq=False)
class HeldPrefix(Generic[S]):
    """One state, and the positions by the keys of their marks at which sessions can begin from it."""

    kind: PrefixKind
    positions: Mapping[str, int]
    state: S
    used_at: float
    nbytes: int = field(init=False)
    leases: int = 0

    def __post_init__(self) -> None:
        self.nbytes = prefix_nbytes(self.state, self.positions)


class HeldPrefixes(Generic[S]):
    """The prefixes of one node, least recently used first.

    Args:
        clock: tells how old they are.
        most: how many at once; 0 holds none.
        ttl_s: one unused for longer is dropped.
    """

    def __init__(self, clock: Clock, *, most: int, ttl_s: float) -> None:
        self.most = most
        self.ttl_s = ttl_s
        self.evicted = 0  # for want of room, or because there were too many
        self._clock = clock
        self._held: OrderedDict[HeldPrefix[S], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[HeldPrefix[S]]:
        return iter(list(self._held))

    @property
    def nbytes(self) -> int:
        """Bytes of all that is held."""
        return sum(held.nbytes for held in self._held)

    @property
    def idle_nbytes(self) -> int:
        """Bytes of what could go now."""
        return sum(held.nbytes for held in self._held if not held.leases)

    def find(self, kind: PrefixKind, marks: Sequence[Mark]) -> dict[int, HeldPrefix[S]]:
        """Where a session with these marks could begin, and from what; what is found counts as used now."""
        self.sweep()
        keys = {mark.key for mark in marks}
        found: dict[int, HeldPrefix[S]] = {}
        for held in list(self._held):
            if held.kind == kind and (common := keys & held.positions.keys()):
                found |= {held.positions[key]: held for key in common}
                self._touch(held)
        return found

    def keep(self, kind: PrefixKind, positions: Mapping[str, int], state: S) -> None:
        """Hold ``state``, for which the caller has made room; what it serves too is then not held twice.

        Args:
            kind, positions: see `HeldPrefix`.
            state: nobody else has it any more, and it serves at each of the positions.
        """
        if self.most < 1 or not positions:
            return
        for held in self:
            if held.kind == kind and not held.leases and held.positions.keys() <= positions.keys():
                del self._held[held]
        new = HeldPrefix(kind, positions, state, self._clock.now())
        self._held[new] = None
        while len(self._held) > self.most and self._evict_oldest(spared=new):
            pass

    def covers(self, kind: PrefixKind, keys: frozenset[str]) -> bool:
        """Whether something held serves at all of ``keys``; it then counts as used now."""
        for held in self:
            if held.kind == kind and keys <= held.positions.keys():
                self._touch(held)
                return True
        return False

    @contextmanager
    def lease(self, kind: PrefixKind, key: str) -> Iterator[HeldPrefix[S] | None]:
        """Hold on to what serves at ``key`` while it is copied; None where nothing does any more."""
        held = next((held for held in self if held.kind == kind and key in held.positions), None)
        if held is None:
            yield None
            return
        held.leases += 1
        try:
            yield held
        finally:
            held.leases -= 1
            self._touch(held)

    def give_way(self, nbytes: int) -> None:
        """Drop what is idle, least recently used first, until ``nbytes`` are freed or nothing idle is left."""
        target = self.nbytes - nbytes
        while self.nbytes > target and self._evict_oldest():
            pass

    def sweep(self) -> None:
        """Drop what nobody used for longer than the time to live."""
        deadline = self._clock.now() - self.ttl_s
        for held in self:
            if not held.leases and held.used_at < deadline:
                del self._held[held]

    def _evict_oldest(self, spared: HeldPrefix[S] | None = None) -> bool:
        oldest = next((held for held in self._held if not held.leases and held is not spared), None)
        if oldest is None:
            return False
        del self._held[oldest]
        self.evicted += 1
        return True

    def _touch(self, held: HeldPrefix[S]) -> None:
        held.used_at = self._clock.now()
        if held in self._held:
            self._held.move_to_end(held)
