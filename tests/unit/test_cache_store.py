"""The session store: what gives way to whom, what is never taken, and why something is not there."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from meshnet_core.clock import ManualClock
from meshnet_core.errors import CacheFullError, CacheMissError, MissReason
from meshnet_core.layer_range import LayerRange
from meshnet_node import held_prefixes
from meshnet_node.cache_store import CacheStore, RoomAwaitedError, SessionKey, StoreLimits
from meshnet_node.held_prefixes import PrefixKind

LIMITS = StoreLimits(budget_bytes=100, max_sessions=4, ttl_s=60.0, running_s=10.0)


@dataclass
class Held:
    """Something with bytes; two of them compare equal, as sessions with equal fields would."""

    nbytes: int = 0
    cancels: int = 0

    def cancel(self) -> None:
        self.cancels += 1


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def store(clock: ManualClock) -> CacheStore[Held]:
    return CacheStore(LIMITS, clock)


def key(session: str, hop_index: int = 0) -> SessionKey:
    return SessionKey(session, hop_index)


def admit(store: CacheStore[Held], session: str, reserve: int = 0, epoch: int = 0, hop_index: int = 0) -> Held:
    held = Held()
    store.admit(key(session, hop_index), epoch, held, reserve)
    return held


def names(store: CacheStore[Held]) -> set[str]:
    return {name for name in "abcdefgh" if store.find(key(name)) is not None}


def miss(store: CacheStore[Held], session: str, epoch: int = 0, hop_index: int = 0) -> MissReason:
    with pytest.raises(CacheMissError) as caught:
        store.require(key(session, hop_index), epoch)
    return caught.value.reason


# -- admission --------------------------------------------------------------------------------------------------------


def test_a_newcomer_takes_the_room_of_idle_ones_least_recently_used_first(
    store: CacheStore[Held], clock: ManualClock
) -> None:
    for name in "abc":
        admit(store, name, 30)
        clock.advance(1)
    with store.lease(key("a"), 0):  # a becomes the most recently used
        pass
    clock.advance(10)
    admit(store, "d", 35)
    assert names(store) == {"a", "c", "d"}
    assert miss(store, "b") is MissReason.EVICTED
    assert store.dropped == {MissReason.EVICTED: 1}


def test_looking_at_an_entry_is_no_use_of_it(store: CacheStore[Held], clock: ManualClock) -> None:
    for name in "abc":
        admit(store, name, 30)
    store.find(key("a"))
    store.require(key("a"), 0)
    clock.advance(10)
    admit(store, "d", 30)
    assert names(store) == {"b", "c", "d"}


def test_no_more_give_way_than_needed(store: CacheStore[Held], clock: ManualClock) -> None:
    for name in "abc":
        admit(store, name, 30)
    clock.advance(10)
    admit(store, "d", 10)
    assert names(store) == {"a", "b", "c", "d"}


def test_a_newcomer_never_takes_what_runs_and_changes_nothing_when_refused(
    store: CacheStore[Held], clock: ManualClock
) -> None:
    admit(store, "a", 30)
    clock.advance(9.9)
    admit(store, "b", 40)
    clock.advance(0.1)  # a is idle now, b is not
    with pytest.raises(CacheFullError, match="no room for a session of 61 bytes: 70 of 100"):
        admit(store, "c", 61)
    assert names(store) == {"a", "b"}
    admit(store, "d", 60)
    assert names(store) == {"b", "d"}


def test_one_whose_steps_may_take_long_is_running_for_as_long(store: CacheStore[Held], clock: ManualClock) -> None:
    """Its frame may be at another hop all that time."""
    store.admit(key("a"), 0, Held(), 60, step_s=30.0)
    clock.advance(29.9)
    with pytest.raises(CacheFullError):
        admit(store, "b", 60)
    assert not store.evict_idle(lambda held: True)
    clock.advance(0.1)
    admit(store, "b", 60)
    assert names(store) == {"b"}


def test_a_leased_entry_is_never_taken_however_long_its_frame_runs(store: CacheStore[Held], clock: ManualClock) -> None:
    admit(store, "a", 60)
    with store.lease(key("a"), 0):
        clock.advance(10 * LIMITS.ttl_s)
        with pytest.raises(CacheFullError):
            admit(store, "b", 60)
        assert store.sweep() == 0
    assert names(store) == {"a"}
    clock.advance(10)  # its idle time counts from the end of the frame
    admit(store, "b", 60)
    assert names(store) == {"b"}


def test_the_number_of_sessions_is_bounded_too(store: CacheStore[Held], clock: ManualClock) -> None:
    for name in "abcd":
        admit(store, name)
    with pytest.raises(CacheFullError, match="4 of 4 sessions"):
        admit(store, "e")
    clock.advance(10)
    admit(store, "e")
    assert names(store) == {"b", "c", "d", "e"}


def test_what_could_never_fit_is_told_so(store: CacheStore[Held]) -> None:
    with pytest.raises(CacheFullError, match="101 bytes is more than this node's budget of 100"):
        admit(store, "a", 101)


def test_with_no_budget_there_is_room_for_sessions_that_take_none(clock: ManualClock) -> None:
    store: CacheStore[Held] = CacheStore(StoreLimits(budget_bytes=0), clock)
    admit(store, "a", 0)
    with store.lease(key("a"), 0):
        pass
    with pytest.raises(CacheFullError):
        admit(store, "b", 1)


# -- epochs -----------------------------------------------------------------------------------------------------------


def test_a_newer_epoch_replaces_the_older_one_and_its_room(store: CacheStore[Held]) -> None:
    old = admit(store, "a", 90)
    new = admit(store, "a", 95, epoch=1)
    assert (old.cancels, new.cancels) == (1, 0)
    assert store.find(key("a")) == (new, 1)
    assert store.nbytes == 95
    assert store.dropped == {MissReason.EPOCH_STALE: 1}
    assert miss(store, "a", epoch=0) is MissReason.EPOCH_STALE
    assert miss(store, "a", epoch=2) is MissReason.UNKNOWN_SESSION


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_that_is_not_newer_is_stale(store: CacheStore[Held], epoch: int) -> None:
    held = admit(store, "a", 10, epoch=1)
    with pytest.raises(CacheMissError) as caught:
        admit(store, "a", 10, epoch=epoch)
    assert caught.value.reason is MissReason.EPOCH_STALE
    assert held.cancels == 0


def test_an_epoch_that_was_evicted_cannot_be_opened_again_but_the_next_can(store: CacheStore[Held]) -> None:
    admit(store, "a", 10, epoch=3)
    store.drop(key("a"), MissReason.EVICTED)
    with pytest.raises(CacheMissError) as caught:
        admit(store, "a", 10, epoch=3)
    assert caught.value.reason is MissReason.EPOCH_STALE
    assert miss(store, "a", epoch=2) is MissReason.EPOCH_STALE
    assert miss(store, "a", epoch=3) is MissReason.EVICTED
    assert miss(store, "a", epoch=4) is MissReason.UNKNOWN_SESSION  # nothing of that epoch was evicted
    admit(store, "a", 10, epoch=4)


def test_an_old_epoch_that_still_runs_counts_until_its_frame_ends_and_touches_nothing_of_the_new(
    store: CacheStore[Held],
) -> None:
    old = admit(store, "a", 60)
    lease = store.lease(key("a"), 0)
    with lease as held:
        new = admit(store, "a", 30, epoch=1)
        assert held is old
        assert old.cancels == 1
        assert store.nbytes == 60 + 30
        assert not store.drop_held(key("a"), old, MissReason.FAILED)
    assert store.nbytes == 30
    assert store.find(key("a")) == (new, 1)
    assert new.cancels == 0


def test_an_old_epoch_that_still_runs_gives_its_room_only_when_its_frame_has_ended(store: CacheStore[Held]) -> None:
    old = admit(store, "a", 60)
    with store.lease(key("a"), 0):
        with pytest.raises(CacheFullError) as caught:
            admit(store, "a", 50, epoch=1)
        assert not caught.value.never
        assert old.cancels == 0
    admit(store, "a", 50, epoch=1)
    assert store.nbytes == 50


def test_a_newer_epoch_ends_the_older_one_at_every_hop_that_this_node_was(store: CacheStore[Held]) -> None:
    """After a change of the route the node is hop 1 and was hops 0 and 2."""
    old = [admit(store, "a", 40, hop_index=hop) for hop in (0, 2)]
    other = admit(store, "b", 10)
    new = admit(store, "a", 80, epoch=1, hop_index=1)
    assert [held.cancels for held in (*old, new, other)] == [1, 1, 0, 0]
    assert store.nbytes == 90
    assert {miss(store, "a", hop_index=hop) for hop in (0, 2)} == {MissReason.EPOCH_STALE}
    with pytest.raises(CacheMissError) as caught:
        admit(store, "a", 0, epoch=0, hop_index=3)
    assert caught.value.reason is MissReason.EPOCH_STALE
    admit(store, "a", 5, epoch=1, hop_index=3)
    assert store.nbytes == 95


def test_two_that_look_alike_are_still_two(store: CacheStore[Held]) -> None:
    """Both leased, then both dropped: each lease ends its own."""
    admit(store, "a", 10)
    admit(store, "b", 10)
    first, second = store.lease(key("a"), 0), store.lease(key("b"), 0)
    first.__enter__()
    second.__enter__()
    store.drop(key("a"), MissReason.FAILED)
    store.drop(key("b"), MissReason.FAILED)
    assert store.nbytes == 20
    second.__exit__(None, None, None)
    assert store.nbytes == 10
    first.__exit__(None, None, None)
    assert store.nbytes == 0


# -- time to live -----------------------------------------------------------------------------------------------------


def test_idle_sessions_expire_after_their_time_and_not_at_it(store: CacheStore[Held], clock: ManualClock) -> None:
    held = admit(store, "a", 10)
    clock.advance(LIMITS.ttl_s)
    assert store.sweep() == 0
    clock.advance(0.1)
    assert miss(store, "a") is MissReason.EXPIRED
    assert held.cancels == 1
    assert store.nbytes == 0


def test_expired_ones_give_way_before_anybody_is_refused(store: CacheStore[Held], clock: ManualClock) -> None:
    admit(store, "a", 60)
    clock.advance(LIMITS.ttl_s + 1)
    admit(store, "b", 60)
    assert store.dropped == {MissReason.EXPIRED: 1}


# -- release ----------------------------------------------------------------------------------------------------------


def test_release_frees_every_hop_of_the_session_and_is_idempotent(store: CacheStore[Held]) -> None:
    helds = [admit(store, "a", 20, hop_index=hop) for hop in (0, 2)]
    other = admit(store, "b", 20)
    assert store.release("a") == 2
    assert store.release("a") == 0
    assert [held.cancels for held in (*helds, other)] == [1, 1, 0]
    assert store.nbytes == 20
    assert {miss(store, "a", hop_index=hop) for hop in (0, 1, 2)} == {MissReason.RELEASED}


def test_a_released_session_never_comes_back(store: CacheStore[Held]) -> None:
    store.release("a")  # before its open arrived, even
    for epoch in (0, 7, 2**31):
        with pytest.raises(CacheMissError, match="over for good") as caught:
            admit(store, "a", 10, epoch=epoch)
        assert caught.value.reason is MissReason.RELEASED


def test_release_through_an_epoch_lets_newer_ones_in(store: CacheStore[Held]) -> None:
    admit(store, "a", 10, epoch=2)
    assert store.release("a", through_epoch=1) == 0
    assert store.find(key("a")) is not None
    assert store.release("a", through_epoch=2) == 1
    for epoch in (1, 2):
        assert miss(store, "a", epoch=epoch) is MissReason.RELEASED
        with pytest.raises(CacheMissError, match="over up to epoch 2"):
            admit(store, "a", 10, epoch=epoch)
    admit(store, "a", 10, epoch=3)


@pytest.mark.parametrize("late", [0, 5])
def test_a_release_of_some_epochs_that_comes_late_takes_nothing_back(store: CacheStore[Held], late: int) -> None:
    store.release("a")
    store.release("a", through_epoch=late)
    with pytest.raises(CacheMissError):
        admit(store, "a", 10, epoch=late + 1)


def test_a_release_while_a_frame_runs_tells_it_to_stop_and_counts_its_bytes_until_it_has(
    store: CacheStore[Held],
) -> None:
    held = admit(store, "a", 60)
    with store.lease(key("a"), 0), store.lease(key("a"), 0):
        assert store.release("a") == 1
        assert held.cancels == 1
        assert len(store) == 0
        assert store.nbytes == 60
    assert store.nbytes == 0
    assert miss(store, "a") is MissReason.RELEASED


def test_a_frame_that_raises_ends_its_lease(store: CacheStore[Held], clock: ManualClock) -> None:
    admit(store, "a", 60)
    with pytest.raises(RuntimeError), store.lease(key("a"), 0):
        raise RuntimeError
    clock.advance(10)
    admit(store, "b", 60)
    assert names(store) == {"b"}


def test_what_departs_is_cancelled_once(store: CacheStore[Held]) -> None:
    held = admit(store, "a", 10)
    assert store.drop_held(key("a"), held, MissReason.FAILED)
    assert not store.drop_held(key("a"), held, MissReason.FAILED)
    assert not store.drop(key("a"), MissReason.EVICTED)
    assert store.release("a") == 0
    assert held.cancels == 1
    assert miss(store, "a") is MissReason.RELEASED


def test_forgotten_tombstones_still_end_in_a_miss(clock: ManualClock) -> None:
    store: CacheStore[Held] = CacheStore(StoreLimits(budget_bytes=100, max_tombstones=4), clock)
    for name in "abcde":
        admit(store, name, 10)
        store.drop(key(name), MissReason.FAILED)
    assert miss(store, "a") is MissReason.UNKNOWN_SESSION
    assert miss(store, "b") is MissReason.FAILED
    assert miss(store, "e") is MissReason.FAILED


def test_a_session_is_known_until_it_is_over_for_good(store: CacheStore[Held]) -> None:
    store.release("a", through_epoch=0)  # of an open that was refused
    assert not store.knows("a")
    admit(store, "a", 10, epoch=1)
    assert store.knows("a")
    store.drop(key("a"), MissReason.EVICTED)
    store.release("a", through_epoch=1)
    assert store.knows("a")
    store.release("a")
    assert not store.knows("a")


# -- growth -----------------------------------------------------------------------------------------------------------


def grow(store: CacheStore[Held], session: str, to: int) -> None:
    """A frame after which ``session`` holds ``to`` bytes."""
    with store.lease(key(session), 0, needs=to) as held:
        held.nbytes = to


def test_room_set_aside_is_grown_into_without_asking_anybody(store: CacheStore[Held]) -> None:
    admit(store, "a", 60)
    admit(store, "b", 40)
    grow(store, "a", 60)
    assert names(store) == {"a", "b"}
    assert store.nbytes == 100


def test_what_an_entry_holds_counts_even_where_it_is_more_than_was_told(store: CacheStore[Held]) -> None:
    held = admit(store, "a", 10)
    held.nbytes = 70
    assert store.nbytes == 70
    with pytest.raises(CacheFullError):
        admit(store, "b", 40)


def test_who_grows_takes_from_idle_ones_first_then_from_the_youngest(
    store: CacheStore[Held], clock: ManualClock
) -> None:
    admit(store, "i", 20)
    clock.advance(10)
    for name in "abc":
        admit(store, name, 25)
    grow(store, "a", 40)
    assert store.find(key("i")) is None
    assert names(store) == {"a", "b", "c"}
    grow(store, "a", 60)
    assert names(store) == {"a", "b"}
    grow(store, "a", 90)
    assert names(store) == {"a"}
    assert store.dropped == {MissReason.EVICTED: 3}


def test_the_youngest_gives_way_when_it_is_the_one_that_cannot_grow(store: CacheStore[Held]) -> None:
    admit(store, "a", 50)
    admit(store, "b", 50)
    with pytest.raises(CacheMissError, match="the youngest") as caught, store.lease(key("b"), 0, needs=60):
        pass
    assert caught.value.reason is MissReason.EVICTED
    assert names(store) == {"a"}


def test_the_youngest_gives_way_also_with_another_frame_of_its_own_under_way(store: CacheStore[Held]) -> None:
    """It may not take an older one's room because it is busy itself."""
    admit(store, "a", 50)
    held = admit(store, "b", 50)
    with store.lease(key("b"), 0, needs=50):
        with pytest.raises(CacheMissError), store.lease(key("b"), 0, needs=60):
            pass
        assert held.cancels == 1
        assert store.nbytes == 100
    assert names(store) == {"a"}
    assert store.nbytes == 50


def test_who_grows_never_takes_a_leased_entry(store: CacheStore[Held]) -> None:
    for name in "abc":
        admit(store, name, 30)
    with store.lease(key("c"), 0):
        grow(store, "a", 50)
        assert names(store) == {"a", "c"}
        with pytest.raises(RoomAwaitedError), store.lease(key("a"), 0, needs=80):
            pass  # c cannot be taken and nobody else is there
        assert names(store) == {"a", "c"}
    grow(store, "a", 80)  # its frame has ended
    assert names(store) == {"a"}


def test_the_youngest_gives_way_though_older_ones_run(store: CacheStore[Held]) -> None:
    for name in "abc":
        admit(store, name, 30)
    with store.lease(key("a"), 0), store.lease(key("b"), 0), pytest.raises(CacheMissError):
        store.lease(key("c"), 0, needs=50).__enter__()
    assert names(store) == {"a", "b"}


def test_what_has_left_and_is_still_run_on_is_waited_for_before_anybody_else_goes(store: CacheStore[Held]) -> None:
    for name in "abc":
        admit(store, name, 30)
    with store.lease(key("c"), 0):
        store.release("c")
        with pytest.raises(RoomAwaitedError), store.lease(key("a"), 0, needs=60):
            pass
        assert names(store) == {"a", "b"}
    grow(store, "a", 60)
    assert names(store) == {"a", "b"}


def test_a_prefix_that_is_copied_from_is_waited_for_before_a_session_goes(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_prefixes, "KEY_NBYTES", 0)
    store: CacheStore[Held] = CacheStore(replace(LIMITS, max_prefixes=2), clock)
    kind = PrefixKind("mine", "f", LayerRange(0, 2), ((-1, "float32"),))
    admit(store, "a", 40)
    admit(store, "b", 30)
    assert store.keep(kind, {"mark": 5}, Held(30))
    with store.prefixes.lease(kind, "mark"):
        with pytest.raises(RoomAwaitedError), store.lease(key("a"), 0, needs=60):
            pass
        assert names(store) == {"a", "b"}
    grow(store, "a", 60)
    assert (names(store), len(store.prefixes)) == ({"a", "b"}, 0)


def test_who_outgrows_the_node_is_told_so_and_its_state_is_dropped(store: CacheStore[Held]) -> None:
    admit(store, "a", 50)
    admit(store, "b", 10)
    with pytest.raises(CacheFullError, match="outgrown this node: it needs 101 of 100"):
        grow(store, "a", 101)
    assert names(store) == {"b"}
    assert miss(store, "a") is MissReason.EVICTED


def test_frames_in_flight_together_name_what_they_lead_to_and_are_counted_once(store: CacheStore[Held]) -> None:
    held = admit(store, "a", 10)
    with store.lease(key("a"), 0, needs=30), store.lease(key("a"), 0, needs=50):
        assert store.nbytes == 50
        held.nbytes = 50
    assert store.nbytes == 50
    grow(store, "a", 60)
    assert store.nbytes == 60


def test_sessions_that_grow_in_turn_do_not_evict_each_other_in_a_circle(store: CacheStore[Held]) -> None:
    """Three that outgrow the node together: each step somebody yields to an older one, so the oldest always ends."""
    waiting, done, epochs = ["a", "b", "c"], [], dict.fromkeys("abc", 0)
    sizes = dict.fromkeys("abc", 20)
    for name in waiting:
        admit(store, name, 20)
    for _ in range(200):
        for name in list(waiting):
            epoch = epochs[name]
            try:
                with store.lease(key(name), epoch, needs=sizes[name] + 10) as held:
                    held.nbytes = sizes[name] = sizes[name] + 10
            except CacheMissError:
                epochs[name] += 1
                try:
                    admit(store, name, sizes[name], epoch=epochs[name])
                except CacheFullError:
                    epochs[name] -= 1  # waits for its turn
            assert store.nbytes <= LIMITS.budget_bytes
            if sizes[name] >= 90:
                store.release(name)
                waiting.remove(name)
                done.append(name)
        if not waiting:
            break
    assert sorted(done) == ["a", "b", "c"]
