"""The session store: what gives way to whom, what is never taken, and why something is not there."""

from __future__ import annotations

import pytest

from meshnet_core.clock import ManualClock
from meshnet_core.errors import CacheFullError, CacheMissError, MissReason
from meshnet_node.cache_store import CacheStore, StoreLimits
from stored_things import LIMITS, Held, admit, key, miss, names


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def store(clock: ManualClock) -> CacheStore[Held]:
    return CacheStore(LIMITS, clock)


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


def test_one_that_a_frame_runs_on_for_long_hides_no_other_that_has_expired(
    store: CacheStore[Held], clock: ManualClock
) -> None:
    admit(store, "a", 10)
    with store.lease(key("a"), 0):
        admit(store, "b", 10)
        clock.advance(LIMITS.ttl_s + 1)
        admit(store, "c", 10)
        assert names(store) == {"a", "c"}
        assert miss(store, "b") is MissReason.EXPIRED


def test_a_frame_that_needs_no_more_than_was_set_aside_takes_room_from_nobody(store: CacheStore[Held]) -> None:
    admit(store, "a", 50)
    admit(store, "b", 50)
    for needs in (0, 50):
        with store.lease(key("b"), 0, needs):
            assert (names(store), store.nbytes) == ({"a", "b"}, 100)
