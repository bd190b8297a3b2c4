"""Any order of opens, frames, releases, drops and waits: the store against a model that hides nothing.

The model says which entries must be there, which room is taken and which reasons for a miss are true. For whom the
store takes room from, it states what may and must not happen, not how.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from meshnet_core.clock import ManualClock
from meshnet_core.errors import CacheFullError, CacheMissError, MeshnetError, MissReason
from meshnet_node.cache_store import CacheStore, RoomAwaitedError, SessionKey, StoreLimits

LIMITS = StoreLimits(budget_bytes=100, stateless_bytes=50, max_sessions=4, ttl_s=60.0, running_s=10.0)
FOR_GOOD = 10**9

sessions = st.sampled_from("abcdefg")
keys = st.builds(SessionKey, sessions, st.integers(0, 1))
epochs = st.integers(0, 6)
sizes = st.integers(0, 60)
waits = st.sampled_from([0.0, 0.5, 9.5, 10.0, 30.0, 60.0, 60.5])
reasons = st.sampled_from([MissReason.FAILED, MissReason.EVICTED])


def refused(call: Callable[[], object]) -> MeshnetError | RoomAwaitedError | None:
    """What ``call`` refuses with; None if it does not."""
    try:
        call()
    except (MeshnetError, RoomAwaitedError) as error:
        return error
    return None


@dataclass(eq=False)
class Held:
    nbytes: int = 0
    cancels: int = 0

    def cancel(self) -> None:
        self.cancels += 1


@dataclass(eq=False)
class Entry:
    """What the model knows of one admitted session."""

    session: str
    held: Held
    epoch: int
    reserved: int
    age: int
    used_at: float
    stateless: bool = False
    leases: int = 0

    @property
    def nbytes(self) -> int:
        return max(self.reserved, self.held.nbytes)


@dataclass(eq=False)
class Frame:
    """A lease that was entered and not left."""

    key: SessionKey
    entry: Entry
    needs: int
    lease: AbstractContextManager[Held]


@dataclass
class Model:
    entries: dict[SessionKey, Entry] = field(default_factory=dict)
    condemned: list[Entry] = field(default_factory=list)
    departed: dict[tuple[SessionKey, int], MissReason] = field(default_factory=dict)
    over: dict[str, int] = field(default_factory=dict)  # session -> released through this epoch
    dropped: Counter[MissReason] = field(default_factory=Counter)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in (*self.entries.values(), *self.condemned))

    def room_beside(self, session: str, stateless: bool) -> float:
        """Bytes that ``session`` may take beside what others of its kind do. Without state, one alone has any."""
        kind = [entry for entry in (*self.entries.values(), *self.condemned) if entry.stateless is stateless]
        taken = sum(entry.nbytes for entry in kind if not stateless or entry.session != session)
        if stateless:
            return LIMITS.stateless_bytes - taken if taken else float("inf")
        return LIMITS.budget_bytes - taken

    def depart(self, key: SessionKey, reason: MissReason) -> None:
        entry = self.entries.pop(key)
        if entry.leases:
            self.condemned.append(entry)
        self.departed[key, entry.epoch] = reason
        self.dropped[reason] += 1

    def newest(self, key: SessionKey) -> int:
        """The newest epoch that was ever admitted here."""
        past = [epoch for other, epoch in self.departed if other == key]
        now = [self.entries[key].epoch] if key in self.entries else []
        return max(past + now, default=-1)

    def true_reasons(self, key: SessionKey, epoch: int) -> set[MissReason]:
        reasons = set()
        if epoch <= self.over.get(key.session, -1):
            reasons.add(MissReason.RELEASED)
        if epoch < self.newest(key):
            reasons.add(MissReason.EPOCH_STALE)
        if (reason := self.departed.get((key, epoch))) is not None:
            reasons.add(reason)
        return reasons or {MissReason.UNKNOWN_SESSION}

    def of_session(self, session: str) -> dict[SessionKey, Entry]:
        return {key: entry for key, entry in self.entries.items() if key.session == session}

    def idle(self, now: float, spared: Collection[SessionKey]) -> list[SessionKey]:
        """Whom a newcomer may take, in the order in which it must."""
        idle = [
            (entry.used_at, key)
            for key, entry in self.entries.items()
            if key not in spared and not entry.leases and now - entry.used_at >= LIMITS.running_s
        ]
        return [key for _, key in sorted(idle, key=lambda pair: pair[0])]


class StoreMachine(RuleBasedStateMachine):
    frames = Bundle("frames")

    @initialize()
    def begin(self) -> None:
        self.clock = ManualClock(1000.0)
        self.store: CacheStore[Held] = CacheStore(LIMITS, self.clock)
        self.model = Model()
        self.admitted = 0
        self.all_held: list[Held] = []

    # -- what is done to it -------------------------------------------------------------------------------------------

    @rule(seconds=waits)
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(seconds=waits)
    def wait_since_a_use(self, seconds: float) -> None:
        """To the very moment that is ``seconds`` after the oldest use, where that is still ahead."""
        oldest = min((entry.used_at for entry in self.model.entries.values()), default=0.0)
        self.clock.advance(max(0.0, oldest + seconds - self.clock.now()))

    @rule(
        key=keys,
        ahead=st.sampled_from([1, 1, 1, 2, 0, -1]),
        reserve=sizes,
        stateless=st.sampled_from([False, False, True]),
    )
    def open(self, key: SessionKey, ahead: int, reserve: int, stateless: bool) -> None:
        known = max(self.model.newest(key), self.model.over.get(key.session, -1))
        epoch = max(0, (known if known < FOR_GOOD else 0) + ahead)
        model, now = self.model, self._tick()
        self._expire()
        held = Held()
        own = model.of_session(key.session)
        stale = epoch <= max(model.newest(key), model.over.get(key.session, -1))
        stale = stale or any(epoch < entry.epoch for entry in own.values())
        replaced = {name: entry for name, entry in own.items() if entry.epoch < epoch}
        room = Model({name: entry for name, entry in model.entries.items() if name not in replaced})
        room.condemned = model.condemned + [entry for entry in replaced.values() if entry.leases]

        def lacks_bytes() -> bool:
            return room.room_beside(key.session, stateless) < reserve

        def lacks_places() -> bool:
            return len(room.entries) + 1 > LIMITS.max_sessions

        victims: list[SessionKey] = []
        for victim in model.idle(now, own):
            if lacks_places() or (lacks_bytes() and model.entries[victim].stateless is stateless):
                victims.append(victim)
                room.entries.pop(victim)
        refusal = refused(lambda: self.store.admit(key, epoch, held, reserve, stateless=stateless))
        if stale:
            assert isinstance(refusal, CacheMissError)
            released = epoch <= model.over.get(key.session, -1)
            assert refusal.reason is MissReason.EPOCH_STALE or (released and refusal.reason is MissReason.RELEASED)
            return
        if lacks_bytes() or lacks_places():
            assert isinstance(refusal, CacheFullError)
            assert not stateless or not refusal.never
            return
        assert refusal is None
        for victim in victims:
            model.depart(victim, MissReason.EVICTED)
        for name in replaced:
            model.depart(name, MissReason.EPOCH_STALE)
        self.admitted += 1
        model.entries[key] = Entry(key.session, held, epoch, reserve, self.admitted, now, stateless)
        self.all_held.append(held)

    @rule(target=frames, which=st.integers(0, 3), needs=sizes | st.integers(0, 110))
    def frame(self, which: int, needs: int) -> object:
        if which >= len(self.model.entries):
            return multiple()
        key = list(self.model.entries)[which]
        return self._begin(key, self.model.entries[key].epoch, needs)

    @rule(target=frames, which=st.integers(0, 3), needs=sizes)
    def frame_in_a_while(self, which: int, needs: int) -> object:
        self.clock.advance(LIMITS.running_s)
        return self.frame(which, needs)

    @rule(target=frames, key=keys, epoch=epochs, needs=sizes)
    def frame_of_any(self, key: SessionKey, epoch: int, needs: int) -> object:
        return self._begin(key, epoch, needs)

    @rule(frame=consumes(frames), share=st.floats(0, 1), fails=st.booleans())
    def end(self, frame: Frame, share: float, fails: bool) -> None:
        now = self._tick()
        entry, model = frame.entry, self.model
        entry.held.nbytes = max(entry.held.nbytes, int(share * frame.needs))
        if fails:
            present = model.entries.get(frame.key) is entry
            assert self.store.drop_held(frame.key, entry.held, MissReason.FAILED) == present
            if present:
                model.depart(frame.key, MissReason.FAILED)
        frame.lease.__exit__(None, None, None)
        entry.leases -= 1
        if model.entries.get(frame.key) is entry:
            entry.used_at = now
        elif not entry.leases:
            model.condemned.remove(entry)

    @rule(session=sessions, through=st.none() | epochs | epochs)
    def release(self, session: str, through: int | None) -> None:
        last = FOR_GOOD if through is None else through
        ended = [key for key, entry in self.model.entries.items() if key.session == session and entry.epoch <= last]
        assert self.store.release(session, through) == len(ended)
        assert self.store.release(session, through) == 0
        for key in ended:
            self.model.depart(key, MissReason.RELEASED)
        self.model.over[session] = max(last, self.model.over.get(session, -1))

    @rule(key=keys, reason=reasons)
    def drop(self, key: SessionKey, reason: MissReason) -> None:
        for entry in self.model.condemned:
            assert not self.store.drop_held(key, entry.held, MissReason.FAILED)
        assert self.store.drop(key, reason) == (key in self.model.entries)
        if key in self.model.entries:
            self.model.depart(key, reason)

    @rule(key=keys, epoch=epochs)
    def require(self, key: SessionKey, epoch: int) -> None:
        assert self.store.sweep() == self._expire()
        entry = self.model.entries.get(key)
        if entry is not None and entry.epoch == epoch:
            assert self.store.require(key, epoch) is entry.held
        else:
            refusal = refused(lambda: self.store.require(key, epoch))
            assert isinstance(refusal, CacheMissError)
            assert refusal.reason in self.model.true_reasons(key, epoch)

    # -- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def the_model_agrees(self) -> None:
        assert set(self.store) == {entry.held for entry in self.model.entries.values()}
        for key, entry in self.model.entries.items():
            assert self.store.find(key) == (entry.held, entry.epoch)
        assert self.store.dropped == self.model.dropped

    @invariant()
    def bytes_are_the_sum_and_within_the_budget(self) -> None:
        assert self.store.nbytes == self.model.nbytes
        # What a frame still runs on, though dropped, is included.
        assert self.store.taken(stateless=False) <= LIMITS.budget_bytes
        stateless = [e for e in (*self.model.entries.values(), *self.model.condemned) if e.stateless]
        if self.store.taken(stateless=True) > LIMITS.stateless_bytes:
            assert len({entry.session for entry in stateless if entry.nbytes}) == 1
        assert len(self.store) <= LIMITS.max_sessions

    @invariant()
    def what_left_was_cancelled_once_and_what_is_here_never(self) -> None:
        present = {id(entry.held) for entry in self.model.entries.values()}
        assert all(held.cancels == (id(held) not in present) for held in self.all_held)

    @invariant()
    def nothing_released_is_here(self) -> None:
        for key, entry in self.model.entries.items():
            assert entry.epoch > self.model.over.get(key.session, -1)

    # -- the model's side ---------------------------------------------------------------------------------------------

    def _tick(self) -> float:
        """A moment that no other use has, so that the order of uses is never a tie."""
        self.clock.advance(2.0**-20)
        return self.clock.now()

    def _expire(self) -> int:
        now = self.clock.now()
        gone = [
            key for key, entry in self.model.entries.items() if not entry.leases and now - entry.used_at > LIMITS.ttl_s
        ]
        for key in gone:
            self.model.depart(key, MissReason.EXPIRED)
        return len(gone)

    def _begin(self, key: SessionKey, epoch: int, needs: int) -> object:
        now = self._tick()
        self._expire()
        model = self.model
        grower = model.entries.get(key)
        before = dict(model.entries)
        idle = model.idle(now, {key})
        lease = self.store.lease(key, epoch, needs)
        refusal = refused(lease.__enter__)
        if grower is None or grower.epoch != epoch:
            assert isinstance(refusal, CacheMissError)
            assert refusal.reason in model.true_reasons(key, epoch)
            return multiple()
        if max(grower.nbytes, needs) > LIMITS.budget_bytes and not grower.stateless:
            assert isinstance(refusal, CacheFullError)
            model.depart(key, MissReason.EVICTED)
            return multiple()
        if isinstance(refusal, RoomAwaitedError):
            others = [*model.condemned, *(e for e in before.values() if e.leases and e.age > grower.age)]
            assert any(other.stateless is grower.stateless for other in others)
            self._check_who_gave_way(key, grower, before, idle, needs)
            return multiple()
        self._check_who_gave_way(key, grower, before, idle, needs)
        if refusal is not None:
            assert isinstance(refusal, CacheMissError)
            assert refusal.reason is MissReason.EVICTED
            assert key not in model.entries
            return multiple()
        assert key in model.entries
        grower.reserved = max(grower.nbytes, needs)
        grower.leases += 1
        grower.used_at = now
        return Frame(key, grower, needs, lease)

    def _check_who_gave_way(
        self,
        key: SessionKey,
        grower: Entry,
        before: dict[SessionKey, Entry],
        idle: list[SessionKey],
        needs: int,
    ) -> None:
        """The entries that the store no longer has are ones it may take for ``grower``; the model follows."""
        model = self.model
        own = 0 if grower.stateless else grower.nbytes
        missing = max(grower.nbytes, needs) - own - model.room_beside(key.session, grower.stateless)
        idle = [other for other in idle if before[other].stateless is grower.stateless]
        gone = [other for other in before if self.store.find(other) is None]
        if missing <= 0:
            assert gone == []
        elif sum(before[other].nbytes for other in idle) >= missing:
            # Idle ones suffice: as few of them as will do, least recently used first.
            assert gone
            assert set(gone) == set(idle[: len(gone)])
            assert sum(before[other].nbytes for other in idle[: len(gone) - 1]) < missing
        for other in gone:
            assert other == key or before[other].leases == 0
            assert before[other].stateless is grower.stateless
            assert other in idle or before[other].age >= grower.age
        for other in gone:
            model.depart(other, MissReason.EVICTED)


StoreMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestStore = StoreMachine.TestCase
