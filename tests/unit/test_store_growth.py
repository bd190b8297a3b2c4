"""Sessions that grow in the store: who gives way to them, and when they give way themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshnet_core.clock import ManualClock
from meshnet_core.errors import CacheFullError, CacheMissError, MissReason
from meshnet_core.layer_range import LayerRange
from meshnet_node import held_prefixes
from meshnet_node.cache_store import CacheStore, RoomAwaitedError
from meshnet_node.held_prefixes import PrefixKind
from stored_things import LIMITS, Held, admit, key, miss, names


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def store(clock: ManualClock) -> CacheStore[Held]:
    return CacheStore(LIMITS, clock)


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
