"""The arithmetic of the benchmarks, on times that are made up."""

from __future__ import annotations

import pytest
from benchmarks.figures import (
    WINDOW,
    Interval,
    Spread,
    TokenTimes,
    agreement,
    mean_batch,
    paired,
    rate,
    ratios,
    speed_between,
)
from benchmarks.first_token import shown_chunks


def ticking(seconds: list[float], first: float = 1.0) -> TokenTimes:
    """Tokens ``seconds`` apart, the first one ``first`` seconds after the request."""
    times = [first]
    for gap in seconds:
        times.append(times[-1] + gap)
    return TokenTimes(tuple(times))


def test_a_speed_leaves_out_the_first_token_and_its_prefill() -> None:
    times = ticking([0.5] * 60, first=100.0)

    assert times.ttft_s == 100.0
    assert times.tokens_per_s == pytest.approx(2.0)


def test_steps_in_one_forward_are_counted_between_two_moments() -> None:
    assert mean_batch({1: 10, 4: 5}, {1: 12, 4: 5, 7: 2}) == pytest.approx((2 * 1 + 2 * 7) / 4)
    assert mean_batch({3: 2}, {3: 2}) == 0.0


def test_the_speed_between_two_moments_counts_the_tokens_that_came() -> None:
    assert speed_between([0.5, 1.0, 2.5, 3.0, 9.0], 1.0, 3.0) == pytest.approx(1.0)


def test_windows_are_runs_of_fifty_steps_and_the_last_one_is_the_newest_fifty() -> None:
    times = ticking([0.1] * WINDOW + [0.2] * WINDOW + [0.4] * 11)

    assert times.windows() == pytest.approx([10.0, 5.0])
    assert times.first_window == pytest.approx(10.0)
    assert times.last_window == pytest.approx(50 / (39 * 0.2 + 11 * 0.4))
    assert times.retention == pytest.approx(times.last_window / 10.0)


def test_a_steady_speed_keeps_all_of_itself() -> None:
    assert ticking([0.25] * 200).retention == pytest.approx(1.0)


@pytest.mark.parametrize("times", [(), (1.0,), (2.0, 1.0)])
def test_times_that_tell_no_speed_are_refused(times: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="token"):
        TokenTimes(times)


def test_ratios_are_taken_within_each_repeat_so_that_a_slow_repeat_cancels_out() -> None:
    spread = ratios([8.0, 4.0, 1.0], [16.0, 8.0, 2.0])

    assert spread == Spread(0.5, 0.5, 0.5)


def test_ratios_of_repeats_that_do_not_pair_up_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratios([1.0, 2.0], [1.0])


def test_a_spread_shows_its_median_and_its_ends() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([3.0, 1.0, 2.0]).shown(1) == "2.0 (1.0-3.0)"
    assert Spread.of([2.0]).shown(1) == "2.0"


def test_a_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Spread.of([])


def test_agreement_counts_tokens_up_to_the_first_that_differs() -> None:
    assert agreement([1, 2, 3], [1, 2, 3]) == 3
    assert agreement([1, 2, 3], [1, 9, 3]) == 1
    assert agreement([1, 2], [1, 2, 3]) == 2


def test_a_rate_of_no_time_is_no_division_by_zero() -> None:
    assert rate([1.0, 1.0]) > 0


@pytest.mark.parametrize(
    ("repeats", "low", "high", "confidence"),
    [(1, 0, 0, 0.0), (3, 0, 2, 0.75), (6, 0, 5, 0.96875), (9, 1, 7, 1 - 20 / 512), (20, 5, 14, 0.9586)],
)
def test_an_interval_goes_inwards_as_far_as_its_confidence_allows(
    repeats: int, low: float, high: float, confidence: float
) -> None:
    found = Interval.of(map(float, reversed(range(repeats))))
    assert (found.median, found.low, found.high, found.repeats) == ((repeats - 1) / 2, low, high, repeats)
    assert found.confidence == pytest.approx(confidence, abs=1e-4)


def test_a_target_is_met_when_the_interval_reaches_it() -> None:
    found = Interval.of([0.58, 0.62, 0.65])
    assert (found.at_most(0.6), found.at_most(0.57)) == (True, False)
    assert (found.at_least(0.65), found.at_least(0.66)) == (True, False)
    assert found.shown() == "0.62 (0.58 to 0.65 at 0.75)"
    with pytest.raises(ValueError, match="interval"):
        Interval.of([])


def test_ratios_pair_up_repeat_by_repeat() -> None:
    assert paired([1.0, 4.0], [2.0, 4.0]) == [0.5, 1.0]


@pytest.mark.parametrize(
    ("lengths", "shown"),
    [
        ([256], "1 of 256"),
        ([128] * 7 + [104], "8 of 128"),
        ([152, 136, 104, 40], "4 of 152-104"),
        ([40, 22], "2 of 40"),
    ],
)
def test_chunks_are_shown_by_their_longest_and_shortest_whole_one(lengths: list[int], shown: str) -> None:
    assert shown_chunks(lengths) == shown
