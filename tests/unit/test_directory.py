"""Leases by an injected clock, the events of the directory, and how many generations share equal covers."""

from __future__ import annotations

from collections import Counter

import pytest

from announcements import node, shard
from meshnet_core.clock import ManualClock
from meshnet_core.demand import Demand
from meshnet_core.errors import DirectoryFullError, InvalidInputError, LayersUnavailableError, UnknownNodeError
from meshnet_core.membership import Snapshot
from meshnet_tracker.directory import NEIGHBOURS, Directory
from meshnet_tracker.events import DirectoryEvent, DrainChanged, Expired, Joined, Left, Restarted


class Watched:
    """A directory with its clock and what it told."""

    def __init__(self, **options: int) -> None:
        self.clock = ManualClock()
        self.events: list[DirectoryEvent] = []
        self.directory = Directory(self.clock, 15.0, on_event=self.events.append, **options)

    def ids(self) -> list[str]:
        return [entry.node_id for entry in self.directory.snapshot().nodes]


@pytest.fixture
def mesh() -> Watched:
    return Watched()


def test_a_node_stays_for_a_lease_and_no_longer(mesh: Watched) -> None:
    assert mesh.directory.announce(node("a", "0-29")) == 15.0
    mesh.clock.advance(14.999)
    assert mesh.ids() == ["a"]
    mesh.clock.advance(0.001)
    assert mesh.ids() == []
    assert mesh.events == [Joined(node("a", "0-29")), Expired(node("a", "0-29"), 15.0)]


def test_a_tracker_that_started_lately_says_that_it_may_not_know_all_nodes(mesh: Watched) -> None:
    mesh.clock.advance(14.999)
    young = mesh.directory.snapshot()
    assert not young.settled
    assert not Snapshot.from_wire(young.to_wire()).settled
    mesh.clock.advance(0.001)
    assert Snapshot.from_wire(mesh.directory.snapshot().to_wire()).settled
    assert Snapshot.from_wire({"nodes": []}).settled


def test_each_heartbeat_renews_the_lease_and_replaces_all_that_was_told(mesh: Watched) -> None:
    mesh.directory.announce(node("a", "0-14", sessions=3))
    mesh.clock.advance(10)
    later = node("a", "0-14", "15-29", sessions=1)
    mesh.directory.announce(later)
    mesh.clock.advance(10)
    assert mesh.directory.snapshot().nodes == (later,)
    assert mesh.events == [Joined(node("a", "0-14", sessions=3))]


def test_only_the_silent_ones_of_many_expire(mesh: Watched) -> None:
    for node_id in "abcd":
        mesh.directory.announce(node(node_id))
        mesh.clock.advance(1)
    mesh.directory.announce(node("b"))
    mesh.clock.advance(13)  # a was heard of 17 s ago, c 15, d 14 and b 13
    assert mesh.ids() == ["b", "d"]
    assert [event.node.node_id for event in mesh.events if isinstance(event, Expired)] == ["a", "c"]


def test_nodes_are_told_in_the_order_of_their_ids(mesh: Watched) -> None:
    for node_id in ("c", "a", "b"):
        mesh.directory.announce(node(node_id))
    assert mesh.ids() == ["a", "b", "c"]


def test_a_node_that_leaves_is_gone_at_once(mesh: Watched) -> None:
    mesh.directory.announce(node("a"))
    mesh.directory.leave("a")
    assert mesh.ids() == []
    assert mesh.events[-1] == Left(node("a"))
    with pytest.raises(UnknownNodeError, match="no node a is registered here"):
        mesh.directory.leave("a")


def test_a_restart_replaces_its_predecessor_while_that_ones_lease_still_runs(mesh: Watched) -> None:
    before, after = node("a", boot="b-1"), node("a", boot="b-2", url="http://a:7999")
    mesh.directory.announce(before)
    mesh.directory.announce(after)
    assert mesh.directory.snapshot().nodes == (after,)
    assert mesh.events == [Joined(before), Restarted(after, before)]
    assert str(mesh.events[-1]) == "node a restarted (b-1 -> b-2), now at http://a:7999 instead of http://a:7410"


def test_two_processes_with_one_id_do_not_take_turns(mesh: Watched) -> None:
    first, second = node("a", boot="b-1"), node("a", boot="b-2")
    mesh.directory.announce(first)
    mesh.directory.announce(second)
    with pytest.raises(InvalidInputError, match="another process has registered as node a"):
        mesh.directory.announce(first)
    mesh.directory.leave("a", "b-2")
    mesh.directory.announce(first)  # the other one is gone
    assert mesh.directory.snapshot().nodes == (first,)


def test_a_late_goodbye_does_not_remove_the_successor(mesh: Watched) -> None:
    mesh.directory.announce(node("a", boot="b-1"))
    mesh.directory.announce(node("a", boot="b-2"))
    with pytest.raises(UnknownNodeError, match="no node a with boot id b-1"):
        mesh.directory.leave("a", "b-1")
    assert mesh.ids() == ["a"]


def test_draining_is_an_event_both_ways(mesh: Watched) -> None:
    for draining in (False, True, True, False):
        mesh.directory.announce(node("a", draining=draining))
    assert mesh.events[1:] == [DrainChanged(node("a", draining=True)), DrainChanged(node("a"))]
    assert [str(event) for event in mesh.events[1:]] == ["node a is draining", "node a takes sessions again"]


def test_events_read_as_log_lines() -> None:
    assert str(Joined(node("a", "0-14"))) == "node a joined from http://a:7410, serving m 0-14 float32"
    assert str(Joined(node("a"))) == "node a joined from http://a:7410, serving nothing yet"
    assert str(Left(node("a"))) == "node a left"
    assert str(Expired(node("a"), 15.04)) == "node a was not heard of for 15.0 s: its lease has expired"


def test_a_full_directory_refuses_newcomers_but_no_heartbeat() -> None:
    mesh = Watched(max_nodes=2)
    mesh.directory.announce(node("a"))
    mesh.clock.advance(5)
    mesh.directory.announce(node("b"))
    with pytest.raises(DirectoryFullError, match="holds 2 nodes"):
        mesh.directory.announce(node("c"))
    mesh.directory.announce(node("b"))
    mesh.clock.advance(10)  # a's lease is over
    mesh.directory.announce(node("c"))
    assert mesh.ids() == ["b", "c"]


def test_a_directory_that_lost_everything_is_whole_after_one_heartbeat_of_each(mesh: Watched) -> None:
    nodes = [node("a", "0-14"), node("b", "15-29")]
    for entry in nodes:
        mesh.directory.announce(entry)
    restarted = Directory(mesh.clock)
    for entry in nodes:
        restarted.announce(entry)
    assert restarted.snapshot() == mesh.directory.snapshot()


def test_a_plan_uses_no_node_whose_lease_is_over(mesh: Watched) -> None:
    mesh.directory.announce(node("a", "0-14"))
    mesh.clock.advance(10)
    mesh.directory.announce(node("b", "15-29"))
    assert str(mesh.directory.plan("m")) == "a[0-14] -> b[15-29]"
    mesh.clock.advance(5)
    with pytest.raises(LayersUnavailableError, match=r"layers 0-14 of m are served by no node$"):
        mesh.directory.plan("m")


def test_generations_that_start_between_two_heartbeats_share_equal_covers(mesh: Watched) -> None:
    for node_id in ("a", "b"):
        mesh.directory.announce(node(node_id, "0-29"))
    taken = Counter(mesh.directory.plan("m").hops[0].node_id for _ in range(400))
    assert sum(taken.values()) == 400
    assert abs(taken["a"] - taken["b"]) <= 2  # one in twenty explores


def test_a_heartbeat_puts_real_load_in_the_place_of_routes_given_out(mesh: Watched) -> None:
    for node_id in ("a", "b"):
        mesh.directory.announce(node(node_id, "0-29"))
    assert {mesh.directory.plan("m").hops[0].node_id for _ in range(2)} == {"a", "b"}
    mesh.directory.announce(node("b", "0-29"))  # its session has ended meanwhile
    assert mesh.directory.plan("m").hops[0].node_id == "b"
    assert all(entry.sessions == 0 for entry in mesh.directory.snapshot().nodes)


def test_one_plan_in_twenty_explores_unless_it_must_not(mesh: Watched) -> None:
    mesh.directory.announce(node("fast", "0-29"))
    mesh.directory.announce(node("slow", shard("0-29", decode_ms=40.0)))

    def plans(explore: bool) -> Counter[str]:
        taken = Counter[str]()
        for _ in range(60):
            taken[mesh.directory.plan("m", demand=Demand(explore=explore)).hops[0].node_id] += 1
            mesh.directory.announce(node("fast", "0-29"))  # its session has ended
        return taken

    assert plans(explore=True) == {"fast": 57, "slow": 3}
    assert plans(explore=False) == {"fast": 60}


def test_a_plan_keeps_to_the_fingerprint_asked_for(mesh: Watched) -> None:
    mesh.directory.announce(node("a", shard("0-29", decode_ms=9.0)))
    mesh.directory.announce(node("b", shard("0-29", fingerprint="f2")))
    assert mesh.directory.plan("m", fingerprint="f1").hops[0].node_id == "a"
    assert mesh.directory.plan("m", frozenset({"b"})).fingerprint == "f1"


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_lease_that_is_none_is_refused(lease_s: float) -> None:
    with pytest.raises(InvalidInputError, match="a lease must be above 0 s"):
        Directory(ManualClock(), lease_s)


# -- neighbours -------------------------------------------------------------------------------------------------------


def test_neighbours_hold_the_layer_after_one_of_the_nodes_shards(mesh: Watched) -> None:
    for entry in (
        node("a", "0-14"),
        node("next", "15-29"),
        node("inside", "10-20"),
        node("same", "0-14"),
        node("leaving", "15-29", draining=True),
        node("other", shard("15-29", fingerprint="f2")),
    ):
        mesh.directory.announce(entry)
    assert {one.node_id for one in mesh.directory.neighbours("a", 0.0)} == {"next", "inside"}
    assert mesh.directory.neighbours("next", 0.0) == []
    assert mesh.directory.neighbours("nobody", 0.0) == []


def test_of_many_neighbours_a_few_are_told_and_later_others(mesh: Watched) -> None:
    mesh.directory.announce(node("a", "0-14"))
    for index in range(20):
        mesh.directory.announce(node(f"n{index}", "15-29"))
    told = [[one.node_id for one in mesh.directory.neighbours("a", at / 10)] for at in range(10)]
    assert {len(set(names)) for names in told} == {NEIGHBOURS}
    assert len({name for names in told for name in names}) > 15
