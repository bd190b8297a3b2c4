"""What a slow link adds to a round trip, and what a token over it is told by. No time is compared with another."""

from __future__ import annotations

import pytest
from benchmarks.slow_link import added_trip_s, echo_link
from benchmarks.slow_links import PLAIN, SLOW, Found


async def test_a_trip_is_late_both_ways() -> None:
    async with echo_link() as link:
        assert await added_trip_s(link, 0.05) >= 0.07  # of 0.1, less what trips without delay take on a busy machine


def test_a_token_is_told_by_c_and_the_trip_of_its_own_repeat() -> None:
    found = Found()
    found.token_ms[PLAIN], found.trip_ms, found.token_ms[SLOW] = (
        [10.0, 20.0, 10.0],
        [40.0, 41.0, 42.0],
        [55.0, 61.0, 52.0],
    )
    assert (found.overhead().median, found.overhead().low, found.overhead().high) == (1.0, 1.0, 1.1)
    assert found.overhead_by(40.0).median == pytest.approx(52 / 50)
