"""Requests of a peer: a burst, then a rate, and no peer at another's cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet_core.clock import ManualClock
from meshnet_core.doorkeeper import QUIET_S, Doorkeeper
from meshnet_core.errors import InvalidInputError, RateLimitedError, error_from_wire
from meshnet_core.rate_limit import PeerRates


def test_a_burst_then_the_rate() -> None:
    clock = ManualClock()
    rates = PeerRates(clock, per_s=2.0, burst=3)
    assert [rates.take("a") for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert rates.take("b") == 0.0
    clock.advance(0.5)
    assert [rates.take("a") for _ in range(2)] == [0.0, 0.5]
    clock.advance(100)
    assert [rates.take("a") for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]


@given(st.lists(st.floats(0, 2), max_size=60))
def test_never_more_than_burst_and_rate_allow(pauses: list[float]) -> None:
    clock = ManualClock()
    rates = PeerRates(clock, per_s=3.0, burst=5)
    admitted, passed = 0, 0.0
    for pause in pauses:
        clock.advance(pause)
        passed += pause
        admitted += rates.take("a") == 0.0
        assert admitted <= 5 + 3.0 * passed + 1e-6


def test_peers_are_forgotten_beyond_a_bound() -> None:
    rates = PeerRates(ManualClock(), per_s=1.0, burst=1, max_peers=2)
    assert [rates.take(peer) for peer in "abc"] == [0.0, 0.0, 0.0]
    assert rates.take("c") == 1.0
    assert rates.take("a") == 0.0


@pytest.mark.parametrize(("per_s", "burst"), [(0, 1), (1, 0.5), (float("nan"), 1), (1, float("inf"))])
def test_a_rate_that_is_none_is_refused(per_s: float, burst: float) -> None:
    with pytest.raises(InvalidInputError):
        PeerRates(ManualClock(), per_s, burst)


def test_a_doorkeeper_counts_all_and_logs_each_kind_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    keeper = Doorkeeper(clock, per_s=1, burst=1)
    for _ in range(5):
        keeper.turn_away("expired", "10.0.0.9")
    keeper.turn_away("expired", "10.0.0.8")
    clock.advance(QUIET_S)
    keeper.turn_away("expired", "10.0.0.9")
    assert keeper.turned_away["expired"] == 7
    assert [record.getMessage().split()[1] for record in caplog.records] == ["10.0.0.9", "10.0.0.8", "10.0.0.9"]


def test_who_asks_too_much_is_told_when_to_come_back() -> None:
    keeper = Doorkeeper(ManualClock(), per_s=0.5, burst=1)
    keeper.admit("owner", "10.0.0.9")
    with pytest.raises(RateLimitedError) as caught:
        keeper.admit("owner", "10.0.0.7")
    assert caught.value.retry_after_s == 2.0
    assert keeper.turned_away["rate"] == 1
    keeper.admit("another", "10.0.0.9")
    back = error_from_wire(caught.value.to_wire(), fallback="")
    assert isinstance(back, RateLimitedError)
    assert back.retry_after_s == 2.0
