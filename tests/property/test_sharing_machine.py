"""Two trackers that share a directory, and whatever nodes, wires and clocks may do to them in any order.

Nodes join, announce themselves to either tracker or to both, late and again, restart, say goodbye and fall silent;
either wire to the registry is cut and mended, and the registry loses all it held; time goes on. A model beside it knows
what each node said, and when the newest of it reached anybody.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from announcements import node
from memory_registry import MemoryStore
from meshnet_core.clock import ManualClock
from meshnet_core.errors import InvalidInputError, UnknownNodeError
from meshnet_core.membership import NodeInfo
from meshnet_tracker.directory import GOODBYE_LEASES
from meshnet_tracker.events import Expired, Joined, Left
from sharing_tracker import LEASE_S, SharingTracker

IDS = ("a", "b", "c")
trackers = st.sampled_from([0, 1])
ids = st.sampled_from(IDS)


@dataclass
class Start:
    """One start of a node, as the node knows it."""

    info: NodeInfo
    sent: list[NodeInfo] = field(default_factory=list)
    gone: bool = False

    def beat(self) -> NodeInfo:
        told = replace(self.info, beat=len(self.sent) + 1, sessions=len(self.sent))
        self.sent.append(told)
        return told


class SharedDirectory(RuleBasedStateMachine):
    """The rules; the loop runs only within them."""

    @initialize()
    def begin(self) -> None:
        self.runner = asyncio.Runner()
        self.clock = ManualClock(1e6)
        self.store = MemoryStore(self.clock)
        self.now = 0.0
        self.starts: dict[str, list[Start]] = {node_id: [] for node_id in IDS}
        self.heard_at: dict[str, float] = {}  # by boot: when its newest announcement so far came to a tracker
        self.goodbyes: dict[str, tuple[int, float]] = {}  # by boot: to whom, and when
        self.late: list[NodeInfo] = []
        self.both: list[SharingTracker] = []

        async def begin() -> None:
            self.both = [SharingTracker("one", self.store, 10.0), SharingTracker("two", self.store, 5e8)]
            for tracker in self.both:
                tracker.start()

        self.runner.run(begin())
        self._settle()

    def teardown(self) -> None:
        async def end() -> None:
            for tracker in self.both:
                await tracker.stop()

        if not hasattr(self, "runner"):
            return
        try:
            self.once_the_wires_are_whole_both_know_the_same_and_the_newest()
        finally:
            self.runner.run(end())
            self.runner.close()

    # -- what nodes do --------------------------------------------------------------------------------------------

    @rule(node_id=ids, at=trackers)
    def a_node_starts(self, node_id: str, at: int) -> None:
        number = len(self.starts[node_id])
        boot = f"b-{node_id}{9 - number % 10}-{number}"  # the order of boot ids is not that of starts
        self.starts[node_id].append(Start(node(node_id, "0-29", boot=boot, started=1000 + number)))
        self._announce(self.starts[node_id][-1].beat(), at)

    @rule(node_id=ids, at=trackers, also_other=st.booleans())
    def a_node_beats(self, node_id: str, at: int, also_other: bool) -> None:
        if self.starts[node_id] and not self.starts[node_id][-1].gone:
            told = self.starts[node_id][-1].beat()
            self._announce(told, at)
            if also_other:
                self._announce(told, 1 - at)

    @rule(node_id=ids)
    def a_beat_is_held_up(self, node_id: str) -> None:
        if self.starts[node_id] and not self.starts[node_id][-1].gone:
            self.late.append(self.starts[node_id][-1].beat())

    @precondition(lambda self: self.late)
    @rule(at=trackers, which=st.integers(0, 99))
    def it_arrives_after_all(self, at: int, which: int) -> None:
        self._announce(self.late.pop(which % len(self.late)), at)

    @rule(node_id=ids, at=trackers, which=st.integers(0, 99))
    def a_beat_arrives_again(self, node_id: str, at: int, which: int) -> None:
        sent = [told for start in self.starts[node_id] for told in start.sent if told.boot in self.heard_at]
        if sent:
            self._announce(sent[which % len(sent)], at)

    @rule(node_id=ids, at=trackers)
    def a_node_says_goodbye(self, node_id: str, at: int) -> None:
        if self.starts[node_id] and not self.starts[node_id][-1].gone:
            start = self.starts[node_id][-1]
            start.gone = True
            self.goodbyes[start.info.boot] = (at, self.now)
            with suppress(UnknownNodeError):  # it is remembered all the same
                self.both[at].directory.leave(node_id, start.info.boot)
            self._settle()

    # -- what becomes of the rest -----------------------------------------------------------------------------------

    @rule(which=trackers, cut=st.booleans())
    def a_wire_is_cut_or_mended(self, which: int, cut: bool) -> None:
        async def change() -> None:
            self.both[which].wire.cut = cut

        self.runner.run(change())
        self._settle()

    @rule()
    def the_registry_loses_everything(self) -> None:
        async def restart() -> None:  # nobody's connection outlives that
            cut = [tracker.wire.cut for tracker in self.both]
            for tracker in self.both:
                tracker.wire.cut = True
            self.store.lose_everything()
            for tracker, was in zip(self.both, cut, strict=True):
                tracker.wire.cut = was

        self.runner.run(restart())
        self._settle()

    @rule(seconds=st.sampled_from([0.5, 3.0, 5.0, 14.0, 16.0]))
    def time_goes_on(self, seconds: float) -> None:
        self._advance(seconds)

    # -- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def nobody_knows_what_was_never_said(self) -> None:
        for tracker in getattr(self, "both", []):
            for node_id, told in tracker.known().items():
                assert any(told in start.sent for start in self.starts[node_id])

    @invariant()
    def a_node_is_known_by_itself_for_a_lease_and_no_longer(self) -> None:
        """Of those that a tracker hears itself, and with both wires whole of all."""
        if not getattr(self, "both", []):
            return
        joined = all(tracker.sharing.reachable for tracker in self.both)
        for tracker in self.both:
            for told in tracker.known().values():
                lease = tracker.directory._leases[told.node_id]
                if not lease.relayed:
                    assert self.now - self.heard_at[told.boot] < LEASE_S
                if joined:
                    assert self.now - self.heard_at[told.boot] < 2 * LEASE_S + 600  # `hold` and the lease after it

    @invariant()
    def events_add_up_to_what_is_known(self) -> None:
        for tracker in getattr(self, "both", []):
            known = set(tracker.known())
            told: set[str] = set()
            for event in tracker.events:
                if isinstance(event, Joined):
                    assert event.node.node_id not in told
                    told.add(event.node.node_id)
                elif isinstance(event, Expired | Left):
                    told.remove(event.node.node_id)
            assert told == known

    def once_the_wires_are_whole_both_know_the_same_and_the_newest(self) -> None:
        """At the end of every story: whoever is alive is known to both at once, and a lease later nobody else is."""

        async def mend() -> None:
            for tracker in self.both:
                tracker.wire.cut = False

        self.runner.run(mend())
        self._settle(wake=True)
        self._settle(wake=True)
        assert all(tracker.sharing.reachable for tracker in self.both)
        alive = [starts[-1] for starts in self.starts.values() if starts and not starts[-1].gone]
        for start in alive:
            if self.now - self.heard_at.get(start.info.boot, -1e9) < LEASE_S:
                newest = [tracker.known()[start.info.node_id] for tracker in self.both]
                assert newest[0] == newest[1]
                assert newest[0].boot == start.info.boot
        for _ in range(4):
            for start in alive:
                self._announce(start.beat(), start.info.started % 2)
            self._advance(LEASE_S / 3)
        right = {start.info.node_id: start.sent[-1] for start in alive}
        assert [tracker.known() for tracker in self.both] == [right, right]
        self._advance(LEASE_S)
        assert [tracker.known() for tracker in self.both] == [{}, {}]

    # -- how ------------------------------------------------------------------------------------------------------

    def _announce(self, told: NodeInfo, at: int) -> None:
        known = {tracker.known().get(told.node_id) for tracker in self.both}
        try:
            self.both[at].directory.announce(told)
        except InvalidInputError:
            before = [one for one in known if one is not None]
            over = any(start.gone for start in self.starts[told.node_id] if start.info.boot == told.boot)
            assert over or any(one.started > told.started for one in before)
        else:
            said = self.goodbyes.get(told.boot)
            assert said is None or said[0] != at or self.now - said[1] >= GOODBYE_LEASES * LEASE_S
            held = self.both[at].known().get(told.node_id)
            assert held is not None
            assert (held.started, held.beat) >= (told.started, told.beat)
            if held == told and self.both[at].directory._leases[told.node_id].heard_at == self.both[at].clock.now():
                self.heard_at[told.boot] = self.now
        self._settle()

    def _advance(self, seconds: float) -> None:
        self.now += seconds
        for clock in (self.clock, *(tracker.clock for tracker in self.both)):
            clock.advance(seconds)
        self._settle(wake=True)

    def _settle(self, *, wake: bool = False) -> None:
        async def settle() -> None:
            if wake:
                for tracker in self.both:
                    tracker.wake()
            for _ in range(60):
                await asyncio.sleep(0)

        self.runner.run(settle())


SharedDirectory.TestCase.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
TestSharedDirectory = SharedDirectory.TestCase


@pytest.mark.long
class TestSharedDirectoryAtLength(SharedDirectory.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
