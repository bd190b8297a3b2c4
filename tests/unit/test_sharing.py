"""Trackers that share a directory through a registry in this process; wires are cut and mended, time is scripted."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator

import pytest

from announcements import node
from memory_registry import MemoryStore
from meshnet_core.clock import ManualClock
from meshnet_core.errors import InvalidInputError
from meshnet_tracker.events import DrainChanged, Expired, Joined, Left, Restarted
from meshnet_tracker.leases import MAX_HOLD_S
from meshnet_tracker.registry import Entry
from meshnet_tracker.sightings import Goodbye, Heard, told_from_wire, told_to_wire
from sharing_tracker import LEASE_S, SharingTracker


class Trackers:
    """Two trackers over one store; clocks of all three differ, and go on together."""

    def __init__(self) -> None:
        self.clock = ManualClock(1e6)
        self.store = MemoryStore(self.clock)
        self.one, self.two = SharingTracker("one", self.store, 50.0), SharingTracker("two", self.store, 7e8)

    async def settle(self) -> None:
        """Let all that is under way arrive."""
        for _ in range(60):
            await asyncio.sleep(0)

    async def wake(self) -> None:
        """Whoever waits for a while has waited for long enough."""
        self.one.wake()
        self.two.wake()
        await self.settle()

    async def advance(self, seconds: float) -> None:
        for clock in (self.clock, self.one.clock, self.two.clock):
            clock.advance(seconds)
        await self.wake()

    def cut(self, cut: bool) -> None:
        self.one.wire.cut = self.two.wire.cut = cut


@pytest.fixture
async def trackers() -> AsyncIterator[Trackers]:
    both = Trackers()
    both.one.start()
    both.two.start()
    await both.settle()
    yield both
    await both.one.stop()
    await both.two.stop()


async def test_what_one_tracker_is_told_the_other_knows(trackers: Trackers) -> None:
    trackers.one.directory.announce(node("a", "0-14", beat=1))
    trackers.two.directory.announce(node("b", "15-29", beat=1))
    await trackers.settle()
    assert trackers.one.ids() == trackers.two.ids() == ["a", "b"]
    assert trackers.one.directory.snapshot() == trackers.two.directory.snapshot()
    assert trackers.two.events == [Joined(node("b", "15-29", beat=1)), Joined(node("a", "0-14", beat=1))]
    assert trackers.one.directory.counts() == (1, 1)
    assert [info.url for info in trackers.one.sharing.others()] == ["http://two:7400"]


async def test_a_lease_ends_everywhere_when_it_ends_whatever_the_clocks_say(trackers: Trackers) -> None:
    trackers.one.directory.announce(node("a", beat=1))
    await trackers.settle()
    await trackers.advance(LEASE_S - 0.5)
    assert trackers.one.ids() == trackers.two.ids() == ["a"]
    await trackers.advance(0.5)
    assert trackers.one.ids() == trackers.two.ids() == []
    assert trackers.two.kinds() == ["join", "death"]


async def test_a_change_that_is_read_late_is_as_old_as_it_is(trackers: Trackers) -> None:
    trackers.one.directory.announce(node("a", beat=1))
    for clock in (trackers.clock, trackers.one.clock, trackers.two.clock):
        clock.advance(10)  # the other tracker's loop stood still meanwhile
    await trackers.settle()
    assert trackers.two.ids() == ["a"]
    await trackers.advance(5)
    assert trackers.two.ids() == []


async def test_heartbeats_renew_the_lease_at_both(trackers: Trackers) -> None:
    for beat in range(1, 8):
        trackers.one.directory.announce(node("a", beat=beat, sessions=beat))
        await trackers.settle()
        await trackers.advance(5)
    assert trackers.two.directory.snapshot().nodes[0].sessions == 7
    assert trackers.two.kinds() == ["join"]


async def test_leave_drain_and_restart_are_events_at_both(trackers: Trackers) -> None:
    for told in (
        node("a", beat=1),
        node("a", beat=2, draining=True),
        node("a", beat=1, boot="b-new", started=5, url="http://a:9"),
    ):
        trackers.one.directory.announce(told)
        await trackers.settle()
    trackers.one.directory.leave("a", "b-new")
    await trackers.settle()
    assert [type(event) for event in trackers.two.events] == [Joined, DrainChanged, Restarted, DrainChanged, Left]
    assert trackers.two.events == trackers.one.events
    assert trackers.two.ids() == []


async def test_a_node_that_fails_over_is_the_same_node(trackers: Trackers) -> None:
    trackers.one.directory.announce(node("a", beat=1))
    await trackers.settle()
    trackers.two.directory.announce(node("a", beat=2, sessions=4))
    await trackers.settle()
    trackers.one.directory.announce(node("a", beat=1))  # the first one again, late
    await trackers.settle()
    for tracker in (trackers.one, trackers.two):
        assert tracker.directory.snapshot().nodes[0].sessions == 4
        assert tracker.kinds() == ["join"]


async def test_a_start_that_said_goodbye_to_one_is_refused_by_the_other(trackers: Trackers) -> None:
    trackers.one.directory.announce(node("a", beat=7))
    await trackers.settle()
    trackers.one.directory.leave("a", "b-a")
    await trackers.settle()
    with pytest.raises(InvalidInputError, match="has said goodbye"):
        trackers.two.directory.announce(node("a", beat=8))  # was under way
    trackers.two.directory.announce(node("a", boot="b-0", started=1))  # another start may come
    await trackers.settle()
    assert trackers.one.ids() == ["a"]


async def test_without_the_registry_each_goes_on_from_what_it_knows_and_hears(
    trackers: Trackers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="meshnet_tracker.sharing")
    trackers.one.directory.announce(node("a", beat=1))
    trackers.two.directory.announce(node("b", beat=1))
    await trackers.settle()
    trackers.cut(True)
    await trackers.settle()
    for beat in range(2, 8):
        trackers.one.directory.announce(node("a", beat=beat))
        await trackers.advance(LEASE_S / 3)
    # b said nothing to the first tracker, which cannot know better; to the second, which would, b is dead.
    assert trackers.one.ids() == ["a", "b"]
    assert trackers.two.ids() == ["a"]
    assert not trackers.one.sharing.reachable
    assert [info.url for info in trackers.one.sharing.others()] == ["http://two:7400"]  # a place to ask, still
    assert caplog.text.count("goes on from what it knows") == 2
    trackers.one.directory.announce(node("c", beat=1))
    trackers.cut(False)
    await trackers.wake()
    assert trackers.one.sharing.reachable
    assert trackers.one.ids() == ["a", "b", "c"]
    assert trackers.two.ids() == ["a", "c"]
    await trackers.advance(LEASE_S)
    assert "b" not in trackers.one.ids()  # it had one more lease to be heard of
    assert trackers.one.kinds().count("death") >= 1


async def test_what_only_others_heard_of_is_not_held_for_ever(trackers: Trackers) -> None:
    trackers.two.directory.announce(node("b", beat=1))
    await trackers.settle()
    trackers.cut(True)
    await trackers.settle()
    await trackers.advance(MAX_HOLD_S - 1)
    assert trackers.one.ids() == ["b"]
    await trackers.advance(1)
    assert trackers.one.ids() == []


async def test_a_node_that_is_held_and_then_heard_of_is_watched_again(trackers: Trackers) -> None:
    trackers.two.directory.announce(node("b", beat=1))
    await trackers.settle()
    trackers.cut(True)
    await trackers.settle()
    await trackers.advance(60)
    trackers.one.directory.announce(node("b", beat=20))
    await trackers.advance(LEASE_S)
    assert trackers.one.ids() == []
    assert isinstance(trackers.one.events[-1], Expired)


async def test_a_registry_that_lost_everything_is_whole_again_without_any_heartbeat(trackers: Trackers) -> None:
    trackers.one.directory.announce(node("a", beat=1))
    trackers.two.directory.announce(node("b", beat=1))
    await trackers.settle()
    trackers.cut(True)
    trackers.store.lose_everything()
    await trackers.settle()
    trackers.cut(False)
    await trackers.wake()
    third = SharingTracker("three", trackers.store, 0.0)
    third.start()
    await trackers.settle()
    assert third.ids() == ["a", "b"]
    await third.stop()


async def test_a_goodbye_that_one_did_not_hear_of_is_heard_when_the_registry_is_back(trackers: Trackers) -> None:
    trackers.one.directory.announce(node("a", beat=1))
    await trackers.settle()
    trackers.cut(True)
    await trackers.settle()
    trackers.two.directory.leave("a", "b-a")
    assert trackers.one.ids() == ["a"]
    trackers.cut(False)
    await trackers.wake()
    assert trackers.one.ids() == trackers.two.ids() == []


async def test_of_two_starts_on_either_side_of_a_cut_the_later_counts(trackers: Trackers) -> None:
    trackers.cut(True)
    await trackers.settle()
    trackers.one.directory.announce(node("a", boot="b-z", started=1, beat=9))
    trackers.two.directory.announce(node("a", boot="b-a", started=2, beat=1))
    trackers.cut(False)
    await trackers.wake()
    assert [tracker.directory.snapshot().nodes[0].boot for tracker in (trackers.one, trackers.two)] == ["b-a"] * 2


async def test_a_tracker_that_leaves_is_no_longer_named_and_one_that_dies_only_for_a_lease(trackers: Trackers) -> None:
    third = SharingTracker("three", trackers.store, 0.0)
    third.start()
    await trackers.settle()
    assert len(trackers.one.sharing.others()) == 2
    await third.stop()
    await third.sharing.leave()
    await trackers.settle()
    assert [info.tracker_id for info in trackers.one.sharing.others()] == ["t-two"]
    await trackers.two.stop()
    for _ in range(6):
        await trackers.advance(3)
    assert trackers.one.sharing.others() == []


@pytest.mark.parametrize(
    "text", ["", "nonsense", "[]", "{}", '{"node": {}}', '{"goodbye": 3}', '{"tracker": {"url": 3}}', "[" * 100_000]
)
async def test_what_cannot_be_read_is_told_and_passed_over(
    trackers: Trackers, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    await trackers.one.wire.put([Entry("node/t-evil/x", text, 60.0)])
    trackers.one.directory.announce(node("a", beat=1))
    await trackers.settle()
    assert trackers.two.ids() == ["a"]
    assert trackers.two.sharing.reachable
    assert "node/t-evil/x of the registry cannot be read" in caplog.text


async def test_a_lease_longer_than_a_lease_is_none(trackers: Trackers) -> None:
    document = '{"node": ' + json.dumps(node("a", beat=1).to_wire()) + "}"
    await trackers.one.wire.put([Entry("node/t-evil/a", document, 1e9)])
    await trackers.settle()
    assert trackers.two.ids() == ["a"]
    await trackers.advance(LEASE_S)
    assert trackers.two.ids() == []


async def test_a_fault_of_our_own_is_told_and_tried_again(
    trackers: Trackers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(trackers.two.directory, "hear", broken)
    trackers.one.directory.announce(node("a", beat=1))
    await trackers.settle()
    assert "RuntimeError: a bug" in caplog.text
    assert not trackers.two.sharing.reachable
    monkeypatch.undo()
    await trackers.wake()
    assert trackers.two.ids() == ["a"]


@pytest.mark.parametrize(
    "told",
    [
        Heard(node("a", "0-29", beat=3, started=4), 9.5, "owner"),
        Heard(node("a"), 1.0),
        Goodbye("a", "b-a"),
        Goodbye("a", "b-a", 7, "owner"),
    ],
)
def test_what_is_told_is_read_as_it_was_written(told: Heard | Goodbye) -> None:
    left_s = told.left_s if isinstance(told, Heard) else 0.0
    assert told_from_wire(told_to_wire(told), left_s) == told


def test_a_lease_that_lasts_longer_by_what_another_tracker_says_counts_as_relayed() -> None:
    """As after a registry that lost all: there what was relayed has one more lease, and that comes back."""
    tracker = SharingTracker("one", MemoryStore(ManualClock(0.0)), 50.0)
    told = node("a", "0-29", beat=1)
    tracker.directory.announce(told)
    tracker.clock.advance(5.0)
    tracker.directory.hear(Heard(told, LEASE_S - 5.0))  # no later than it was heard here
    assert tracker.directory.counts() == (1, 0)
    tracker.directory.hear(Heard(told, LEASE_S))
    assert tracker.directory.counts() == (0, 1)
    tracker.clock.advance(LEASE_S - 1.0)
    assert tracker.ids() == ["a"]
    tracker.directory.announce(node("a", "0-29", beat=2))
    assert tracker.directory.counts() == (1, 0)
