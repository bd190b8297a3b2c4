"""Any order of sessions and prefixes in one store: never over the budget, prefixes first, a leased one never taken."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from meshnet_core.clock import ManualClock
from meshnet_core.errors import CacheFullError, CacheMissError, MissReason
from meshnet_core.layer_range import LayerRange
from meshnet_core.prefix import Mark, marks_of
from meshnet_node.cache_store import CacheStore, RoomAwaitedError, SessionKey, StoreLimits
from meshnet_node.held_prefixes import KEY_NBYTES, HeldPrefix, PrefixKind, prefix_nbytes

UNIT = KEY_NBYTES  # of bytes here, so that keys are neither all that counts nor nothing
LIMITS = StoreLimits(
    budget_bytes=100 * UNIT, max_sessions=50, ttl_s=60.0, running_s=10.0, max_prefixes=5, prefix_ttl_s=300.0
)
KINDS = [PrefixKind(scope, "f", LayerRange(0, 2), ((-1, "float32"),)) for scope in ("mine", "yours")]

sizes = (st.integers(0, 60) | st.integers(30, 60)).map(lambda units: units * UNIT)
kinds = st.sampled_from(KINDS)
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=6)
sessions = st.sampled_from("abcd")


@dataclass(eq=False)
class State:
    """What is held, and the token ids that it has taken in."""

    nbytes: int
    tokens: tuple[int, ...]


@dataclass(eq=False)
class Held:
    nbytes: int = 0

    def cancel(self) -> None:
        pass


@dataclass(eq=False)
class Lease:
    context: AbstractContextManager[Any]
    held: HeldPrefix[State]


@dataclass
class Before:
    """What matters of the store before something happens to it."""

    prefixes: list[HeldPrefix[State]]
    evicted: int
    sessions: set[Held] = field(default_factory=set)


class PrefixMachine(RuleBasedStateMachine):
    leases = Bundle("leases")

    @initialize()
    def begin(self) -> None:
        self.clock = ManualClock(1000.0)
        self.store: CacheStore[Held] = CacheStore(LIMITS, self.clock)
        self.epoch = 0
        self.leased: list[Lease] = []

    @rule(seconds=st.sampled_from([0.0, 1.0, 10.0, 10.0, 10.0, 10.0, 61.0, 301.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(session=sessions, reserve=sizes)
    def open(self, session: str, reserve: int) -> None:
        before = self._before()
        self.epoch += 1
        try:
            self.store.admit(SessionKey(session, 0), self.epoch, Held(), reserve)
        except CacheFullError:
            assert self._before() == before
            assert self.store.nbytes - self.store.prefixes.idle_nbytes + reserve > LIMITS.budget_bytes
            return
        except CacheMissError:
            return  # released for good
        self._prefixes_went_first(before)

    @rule(session=sessions, needs=sizes, share=st.floats(0, 1))
    def frame(self, session: str, needs: int, share: float) -> None:
        key, before = SessionKey(session, 0), self._before()
        found = self.store.find(key)
        if found is None:
            return
        try:
            with self.store.lease(key, found[1], needs) as held:
                held.nbytes = max(held.nbytes, int(share * needs))
        except (CacheMissError, CacheFullError):
            pass
        except RoomAwaitedError:
            assert self.leased  # frames that copy from prefixes are waited for, before a session goes
            assert set(self.store) == before.sessions
        self._prefixes_went_first(before)

    @rule(session=sessions)
    def end(self, session: str) -> None:
        self.store.drop(SessionKey(session, 0), MissReason.FAILED)

    @rule(kind=kinds, of=tokens, nbytes=sizes, whole=st.booleans())
    def keep(self, kind: PrefixKind, of: list[int], nbytes: int, whole: bool) -> None:
        """A state that can be cut back serves at each of its marks, another at its end alone."""
        sessions = set(self.store)
        marks = all_marks(of) if whole else all_marks(of)[-1:]
        positions = {mark.key: mark.position for mark in marks}
        idle, free = self.store.prefixes.idle_nbytes, LIMITS.budget_bytes - self.store.nbytes
        state = State(nbytes, tuple(of))
        kept = self.store.keep(kind, positions, state)
        assert kept == (prefix_nbytes(state, positions) <= free + idle)
        assert (state in [held.state for held in self.store.prefixes]) == kept
        assert set(self.store) == sessions  # no session gives way to a prefix

    @rule(kind=kinds, of=tokens)
    def find(self, kind: PrefixKind, of: list[int]) -> None:
        found = self.store.prefixes.find(kind, all_marks(of))
        for position, held in found.items():
            assert held.kind == kind  # another scope sees nothing
            assert held.state.tokens[:position] == tuple(of[:position])
        best = max(found, default=0)
        for held in self.store.prefixes:
            ends = [end for end in held.positions.values() if held.state.tokens[:end] == tuple(of[:end])]
            assert held.kind != kind or all(end <= best for end in ends if end <= len(of))

    @rule(target=leases, which=st.integers(0, 4), at=st.integers(0, 5))
    def lease(self, which: int, at: int) -> object:
        there = list(self.store.prefixes)
        if which >= len(there):
            return multiple()
        one = there[which]
        key = list(one.positions)[at % len(one.positions)]
        context = self.store.prefixes.lease(one.kind, key)
        held = context.__enter__()
        assert held is not None
        assert key in held.positions
        self.leased.append(Lease(context, held))
        return self.leased[-1]

    @rule(kind=kinds, of=tokens)
    def lease_of_any(self, kind: PrefixKind, of: list[int]) -> None:
        key = all_marks(of)[-1].key
        there = any(held.kind == kind and key in held.positions for held in self.store.prefixes)
        with self.store.prefixes.lease(kind, key) as held:
            assert (held is not None) == there

    @rule(lease=consumes(leases))
    def leave(self, lease: Lease) -> None:
        self.leased.remove(lease)
        lease.context.__exit__(None, None, None)

    @invariant()
    def bytes_are_the_sum_and_within_the_budget(self) -> None:
        store = self.store
        assert store.prefixes.nbytes == sum(prefix_nbytes(held.state, held.positions) for held in store.prefixes)
        assert store.prefixes.nbytes <= store.nbytes <= LIMITS.budget_bytes
        assert len(store.prefixes) <= LIMITS.max_prefixes + len(self.leased)

    @invariant()
    def what_is_leased_is_there(self) -> None:
        there = list(self.store.prefixes)
        assert all(lease.held in there for lease in self.leased)

    @invariant()
    def nothing_old_stays_once_it_was_looked_at(self) -> None:
        self.store.sweep()
        now = self.clock.now()
        for held in self.store.prefixes:
            assert held.leases or now - held.used_at <= LIMITS.prefix_ttl_s

    def _before(self) -> Before:
        return Before(list(self.store.prefixes), self.store.dropped[MissReason.EVICTED], set(self.store))

    def _prefixes_went_first(self, before: Before) -> None:
        if self.store.dropped[MissReason.EVICTED] > before.evicted:
            assert all(held.leases for held in self.store.prefixes)


def all_marks(of: list[int]) -> tuple[Mark, ...]:
    return marks_of(of, range(1, len(of) + 1))


PrefixMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPrefixes = PrefixMachine.TestCase
