"""What a node makes of how long its posts took."""

from __future__ import annotations

import math

import pytest

from meshnet_core.clock import ManualClock
from meshnet_core.link_info import MIB
from meshnet_core.link_times import LARGE_BYTES, LinkTimes


def test_a_round_trip_is_what_the_other_node_did_not_spend() -> None:
    links = LinkTimes(ManualClock())
    for elapsed in (10.4, 10.5, 10.6):
        links.took("b", elapsed, 10.0)
    (link,) = links.told()
    assert link.node_id == "b"
    assert link.rtt_ms == pytest.approx(0.5)
    assert link.rtt_evidence.count == 3
    assert link.mib_ms is None


def test_large_bodies_tell_the_bandwidth_beyond_the_round_trip() -> None:
    links = LinkTimes(ManualClock())
    links.took("b", 1e9, 0.0, LARGE_BYTES)  # no round trip is known yet: nothing to take off
    links.took("b", 0.5, 0.0)
    links.took("b", 5.0 + 0.5 + 4.0, 5.0, MIB // 2)
    (link,) = links.told()
    assert link.rtt_ms == 0.5
    assert link.mib_ms == pytest.approx(8.0)


def test_a_reply_of_an_earlier_run_tells_nothing() -> None:
    links = LinkTimes(ManualClock())
    links.took("b", 1.0, 7.0)
    assert links.told() == ()


def test_links_age_and_the_longest_unused_is_forgotten() -> None:
    clock = ManualClock()
    links = LinkTimes(clock, most=2)
    links.took("a", 1.0, 0.0)
    clock.advance(10)
    links.took("b", 1.0, 0.0)
    links.took("a", 1.0, 0.0)
    clock.advance(5)
    links.took("c", 1.0, 0.0)
    assert [link.node_id for link in links.told()] == ["a", "c"]
    assert (links.age_s("a"), links.age_s("b")) == (5.0, math.inf)
