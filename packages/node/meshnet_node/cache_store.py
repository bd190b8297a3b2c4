"""What a node keeps between frames, bounded: sessions by key, under one budget of bytes, a count and a time to live.

The store knows ``nbytes`` and nothing of tensors, frames or models. Three rules carry it:

* an entry that a frame holds on lease is never taken, and one used within ``running_s`` is never taken for a newcomer;
* whatever leaves the store leaves a tombstone with the reason, so that a late frame gets an honest miss;
* bytes are counted in one method, `CacheStore.taken`, from what the entries report.

Under the same budget it holds prefixes, what is left of sessions that are over: they are the first to give way.
Sessions that keep no state have room of their own: what their frames take while they run is counted and bounded too,
but one of them always fits, since it is the last resort where there is no room for state.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Generic

from meshnet_core.clock import Clock
from meshnet_core.errors import CacheFullError, CacheMissError, MissReason
from meshnet_node.held_prefixes import HeldPrefixes, PrefixKind, Sized, prefix_nbytes
from meshnet_node.store_room import (
    Entry,
    H,
    Held,
    RoomAwaitedError,
    SessionKey,
    StoreLimits,
    Wanted,
    idle_victims,
    youngest_to_yield,
)
from meshnet_node.tombstones import EVERY_EPOCH, Tombstones

__all__ = ["CacheStore", "Held", "RoomAwaitedError", "SessionKey", "StoreLimits"]


class CacheStore(Generic[H]):
    """Sessions of one node. Not thread-safe: one event loop owns it."""

    def __init__(self, limits: StoreLimits, clock: Clock) -> None:
        self.limits = limits
        self._clock = clock
        self._entries: OrderedDict[SessionKey, Entry[H]] = OrderedDict()  # least recently used first
        self._condemned: list[Entry[H]] = []  # dropped while leased: their bytes count until the lease ends
        self._tombstones = Tombstones(limits.max_tombstones)
        self._admissions = itertools.count()
        self.prefixes: HeldPrefixes[Any] = HeldPrefixes(clock, most=limits.max_prefixes, ttl_s=limits.prefix_ttl_s)
        self.dropped: Counter[MissReason] = Counter()
        self.preempted = 0  # of those evicted: how many gave way to the growth of another, not to a newcomer

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[H]:
        return iter([entry.held for entry in self._entries.values()])

    @property
    def nbytes(self) -> int:
        """Bytes taken by all entries and held prefixes."""
        return self.taken(stateless=False) + self.taken(stateless=True)

    @property
    def free_nbytes(self) -> int:
        """Bytes of state that a newcomer could have without any session giving way."""
        return max(0, self.limits.budget_bytes - self.taken(stateless=False) + self.prefixes.idle_nbytes)

    def taken(self, *, stateless: bool, but: str | None = None) -> int:
        """Bytes taken by the entries that keep no state, or by all others and prefixes; those of one session left out.

        The one place where they are counted.
        """
        entries = (*self._entries.values(), *self._condemned)
        return (0 if stateless else self.prefixes.nbytes) + sum(
            entry.nbytes for entry in entries if entry.stateless is stateless and entry.session != but
        )

    def admit(
        self, key: SessionKey, epoch: int, held: H, reserve: int, step_s: float = 0.0, *, stateless: bool = False
    ) -> None:
        """Take in a new session, or a new epoch of one, with ``reserve`` bytes set aside for it.

        Prefixes give way first, then entries that are idle, least recently used first; running ones never do. What the
        session has here of older epochs ends, at whichever hop: a change of its route may have moved this node to
        another place in it.
        Between two frames here one step of the whole route may pass, ``step_s`` seconds: so long it is running.

        Raises:
            CacheMissError: the session was released, or ``epoch`` is not newer than what is known of it.
            CacheFullError: there is no room, or never would be; nothing was changed.
        """
        self.sweep()
        self._check_newer(key, epoch)
        own = self._of_session(key.session)
        past = [name for name, entry in own.items() if entry.epoch < epoch]
        going = [own[name] for name in past if own[name].stateless is stateless]
        freed = sum(entry.nbytes for entry in going if not entry.leases)  # what a frame runs on stays a while
        others = self.taken(stateless=True, but=key.session) if stateless else self.taken(stateless=False) - freed
        yielding = 0 if stateless else self.prefixes.idle_nbytes
        wanted = Wanted(stateless, others - yielding, reserve, len(self) - len(past) + 1)
        victims = idle_victims(self._entries, wanted, self.limits, self._clock.now(), set(own))
        if victims is None:
            raise CacheFullError(
                self._why_full(stateless, reserve), never=self._never_fits(key, epoch, stateless, reserve)
            )
        if not stateless:
            self.prefixes.give_way(others + reserve - self.limits.budget_bytes)
        for victim in victims:
            self.drop(victim, MissReason.EVICTED)
        for name in past:
            self.drop(name, MissReason.EPOCH_STALE)
        self._tombstones.open(key.session, key.hop_index)
        running_s, now = max(self.limits.running_s, step_s), self._clock.now()
        self._entries[key] = Entry(key.session, held, epoch, reserve, next(self._admissions), now, running_s, stateless)

    def find(self, key: SessionKey) -> tuple[H, int] | None:
        """The entry and its epoch, without touching its place in the order; None if there is none."""
        entry = self._entries.get(key)
        return None if entry is None else (entry.held, entry.epoch)

    def knows(self, session: str) -> bool:
        """Whether something of it is here, or was and left otherwise than by its end."""
        return not self._tombstones.is_over(session) and (
            self._tombstones.was_here(session) or bool(self._of_session(session))
        )

    def require(self, key: SessionKey, epoch: int) -> H:
        """The entry for a frame of ``epoch``.

        Raises:
            CacheMissError: with the reason why there is no usable one.
        """
        self.sweep()
        entry = self._entries.get(key)
        if entry is None:
            reason = self._why_gone(key, epoch)
            raise CacheMissError(f"no state for epoch {epoch} of session {key.session}: {reason.value}", reason=reason)
        if entry.epoch != epoch:
            raise CacheMissError(
                f"session {key.session} is at epoch {entry.epoch}, the frame at {epoch}",
                reason=MissReason.EPOCH_STALE if epoch < entry.epoch else MissReason.UNKNOWN_SESSION,
            )
        return entry.held

    def lease(self, key: SessionKey, epoch: int, needs: int = 0) -> AbstractContextManager[H]:
        """Hold the entry while a frame runs on it; it is held from when the context is entered.

        Args:
            key, epoch: which entry.
            needs: bytes that it may come to hold in all once the frame has run. In all, not in addition: frames of one
                session that are in flight together each name what they and those before them lead to.

        Raises:
            RoomAwaitedError: others have left or will give way, but frames run on them; try again when one has ended.
            CacheMissError: as `require`; also when the session cannot grow and is the youngest, so that it gives way.
            CacheFullError: when it alone would outgrow the budget.
        """
        return _Lease(self, key, epoch, needs)

    def hold(self, key: SessionKey, epoch: int, needs: int) -> Entry[H]:
        """What entering a lease does."""
        self.require(key, epoch)
        self._make_room_to_grow(key, needs)
        entry = self._entries[key]
        entry.leases += 1
        self._touch(key, entry)
        return entry

    def let_go(self, key: SessionKey, entry: Entry[H]) -> None:
        """What the end of a lease does."""
        entry.leases -= 1
        if self._entries.get(key) is entry:
            self._touch(key, entry)
        elif entry.leases == 0:
            self._condemned.remove(entry)

    def drop(self, key: SessionKey, reason: MissReason) -> bool:
        """Take the entry out, leaving a tombstone. Returns whether there was one."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        if entry.leases:
            self._condemned.append(entry)
        self._tombstones.bury(key.session, key.hop_index, reason, entry.epoch)
        self.dropped[reason] += 1
        entry.held.cancel()
        return True

    def drop_held(self, key: SessionKey, held: H, reason: MissReason) -> bool:
        """As `drop`, but only if ``held`` is still what the key names: a newer epoch is left alone."""
        entry = self._entries.get(key)
        return entry is not None and entry.held is held and self.drop(key, reason)

    def release(self, session: str, through_epoch: int | None = None) -> int:
        """Free the entries of ``session``, all of them or those up to an epoch; idempotent. Returns how many."""
        last = EVERY_EPOCH if through_epoch is None else through_epoch
        keys = [key for key, entry in self._entries.items() if key.session == session and entry.epoch <= last]
        for key in keys:
            self.drop(key, MissReason.RELEASED)
        self._tombstones.release(session, last)  # an open or a frame for any hop of it may still be on its way here
        return len(keys)

    def evict_idle(self, wanted: Callable[[H], bool]) -> bool:
        """Evict the entries that are ``wanted``, if none of them is leased or running. Returns whether that is so."""
        now = self._clock.now()
        named = {key: entry for key, entry in self._entries.items() if wanted(entry.held)}
        if any(entry.is_running(now) for entry in named.values()):
            return False
        for key in named:
            self.drop(key, MissReason.EVICTED)
        return True

    def keep(self, kind: PrefixKind, positions: Mapping[str, int], state: Sized) -> bool:
        """Hold ``state`` on as a prefix, see `HeldPrefixes.keep`, if there is room. Returns whether there was.

        Older prefixes give way for it, sessions never do.
        """
        excess = self.taken(stateless=False) + prefix_nbytes(state, positions) - self.limits.budget_bytes
        if excess > self.prefixes.idle_nbytes or self.limits.max_prefixes < 1:
            return False
        self.prefixes.give_way(excess)
        self.prefixes.keep(kind, positions, state)
        return True

    def sweep(self) -> int:
        """Drop what was idle for longer than the time to live. Returns how many."""
        self.prefixes.sweep()
        deadline = self._clock.now() - self.limits.ttl_s
        oldest = next(iter(self._entries.values()), None)
        if oldest is None or oldest.used_at >= deadline:
            return 0
        expired = [key for key, entry in self._entries.items() if entry.leases == 0 and entry.used_at < deadline]
        for key in expired:
            self.drop(key, MissReason.EXPIRED)
        return len(expired)

    def _check_newer(self, key: SessionKey, epoch: int) -> None:
        reason, old_epoch = self._tombstones.of(key.session, key.hop_index)
        if epoch <= old_epoch:
            over = "is over for good" if old_epoch == EVERY_EPOCH else f"is over up to epoch {old_epoch}"
            raise CacheMissError(
                f"session {key.session} {over}, epoch {epoch} included",
                reason=reason if reason is MissReason.RELEASED else MissReason.EPOCH_STALE,
            )
        for name, entry in self._of_session(key.session).items():
            if epoch < entry.epoch or (name == key and epoch == entry.epoch):
                raise CacheMissError(
                    f"session {key.session} is at epoch {entry.epoch} already", reason=MissReason.EPOCH_STALE
                )

    def _of_session(self, session: str) -> dict[SessionKey, Entry[H]]:
        """What it has here, at all of its hops."""
        return {key: entry for key, entry in self._entries.items() if key.session == session}

    def _make_room_to_grow(self, key: SessionKey, needs: int) -> None:
        """Prefixes give way first, then entries as `store_room` says; prefixes that are copied from are waited for."""
        entry = self._entries[key]
        if not entry.stateless and max(needs, entry.held.nbytes) <= entry.reserved:
            return  # it takes no room from others
        stateless, needed = entry.stateless, max(entry.nbytes, needs)
        if needed > self.limits.budget_bytes and not stateless:
            self.drop(key, MissReason.EVICTED)
            raise CacheFullError(
                f"session {key.session} has outgrown this node: it needs {needed} of {self.limits.budget_bytes} bytes",
                never=True,
            )
        if not stateless:
            others = self.taken(stateless=False) - entry.nbytes
            self.prefixes.give_way(others + needed - self.limits.budget_bytes)
        while True:
            others = (
                self.taken(stateless=True, but=key.session) if stateless else self.taken(stateless=False) - entry.nbytes
            )
            wanted = Wanted(stateless, others, needed, len(self))
            if wanted.fits(self.limits):
                break
            victims = idle_victims(self._entries, wanted, self.limits, self._clock.now(), {key})
            if victims is None:
                leaving = any(other.stateless is stateless for other in self._condemned)
                copied_from = not stateless and self.prefixes.idle_nbytes < self.prefixes.nbytes
                victims = [youngest_to_yield(self._entries, key, awaited=leaving or copied_from)]
                self.preempted += 1
            for victim in victims:
                self.drop(victim, MissReason.EVICTED)
            if key not in self._entries:
                raise CacheMissError(
                    f"session {key.session}, the youngest, gave way: no room to grow", reason=MissReason.EVICTED
                )
        entry.reserved = needed

    def _never_fits(self, key: SessionKey, epoch: int, stateless: bool, reserve: int) -> bool:
        """Whether there would be no room if nothing but the session's other hops at this node were held."""
        own = [entry for name, entry in self._of_session(key.session).items() if name != key and entry.epoch == epoch]
        others = sum(entry.nbytes for entry in own)
        alone = Wanted(stateless, 0 if stateless else others, reserve, len(own) + 1)
        return not alone.fits(self.limits)

    def _why_full(self, stateless: bool, reserve: int) -> str:
        limits, kind = self.limits, "session without state" if stateless else "session"
        if reserve > limits.budget_bytes and not stateless:
            return f"a session of {reserve} bytes is more than this node's budget of {limits.budget_bytes} bytes"
        return (
            f"no room for a {kind} of {reserve} bytes: {self.taken(stateless=stateless)} of "
            f"{limits.stateless_bytes if stateless else limits.budget_bytes} bytes and "
            f"{len(self)} of {limits.max_sessions} sessions are taken, and those that run do not give way"
        )

    def _why_gone(self, key: SessionKey, epoch: int) -> MissReason:
        """Why there is nothing of ``epoch`` here, where the key names no entry."""
        reason, last = self._tombstones.of(key.session, key.hop_index)
        if epoch > last:
            return MissReason.UNKNOWN_SESSION  # older epochs were here, this one never was
        return reason if epoch == last or reason is MissReason.RELEASED else MissReason.EPOCH_STALE

    def _touch(self, key: SessionKey, entry: Entry[H]) -> None:
        entry.used_at = self._clock.now()
        self._entries.move_to_end(key)


class _Lease(AbstractContextManager[H]):
    """One of `CacheStore.lease`. No generator: every step takes one, and this is less to run."""

    __slots__ = ("_entry", "_epoch", "_key", "_needs", "_store")

    def __init__(self, store: CacheStore[H], key: SessionKey, epoch: int, needs: int) -> None:
        self._store, self._key, self._epoch, self._needs = store, key, epoch, needs

    def __enter__(self) -> H:
        self._entry = self._store.hold(self._key, self._epoch, self._needs)
        return self._entry.held

    def __exit__(self, *_: object) -> None:
        self._store.let_go(self._key, self._entry)
