"""Running means with their variances, and what they make of a machine that changes."""

from __future__ import annotations

import random
import statistics

import pytest

from meshnet_core.errors import InvalidInputError
from meshnet_core.estimate import STRAYS, WEIGHT, Evidence, RunningEstimate


def estimate_of(*samples: float) -> RunningEstimate:
    estimate = RunningEstimate()
    for at, sample in enumerate(samples):
        estimate.add(sample, float(at))
    return estimate


def test_before_the_first_sample_there_is_nothing_to_tell() -> None:
    assert RunningEstimate().value is None
    assert RunningEstimate().evidence(5.0) is None


def test_the_first_samples_weigh_the_same_as_in_a_plain_mean() -> None:
    samples = [10.0, 12.0, 11.0, 9.0, 10.5]
    estimate = estimate_of(*samples)
    assert estimate.value == pytest.approx(statistics.fmean(samples))
    assert estimate.variance == pytest.approx(statistics.pvariance(samples))


def test_mean_and_deviation_settle_at_those_of_the_samples() -> None:
    rng = random.Random(1)
    told = [estimate_of(*(rng.gauss(10, 1) for _ in range(200))) for _ in range(50)]
    assert statistics.fmean(one.value or 0 for one in told) == pytest.approx(10, abs=0.15)
    assert statistics.fmean(one.variance for one in told) == pytest.approx(1, abs=0.2)
    # The standard error told is how far the means of fifty such machines lie apart.
    errors = [(one.evidence() or Evidence()).standard_error for one in told]
    assert statistics.pstdev([one.value or 0 for one in told]) == pytest.approx(statistics.fmean(errors), rel=0.35)


def test_one_stray_sample_counts_for_little() -> None:
    steady = [10.0, 10.5, 9.5] * 10
    estimate = estimate_of(*steady, 500.0)
    assert estimate.value is not None
    assert 10.0 < estimate.value < 10.0 + WEIGHT * 10.0


@pytest.mark.parametrize("after", [100.0, 1.0])
def test_a_machine_that_became_another_is_told_after_a_few_samples(after: float) -> None:
    steady = [10.0, 10.5, 9.5] * 10
    assert estimate_of(*steady, *[after] * (STRAYS - 1)).value == pytest.approx(10, rel=0.3)
    changed = estimate_of(*steady, *[after] * STRAYS)
    assert changed.value == after
    assert changed.evidence() == Evidence(0.0, STRAYS, 0.0)


def test_whoever_adds_a_sample_is_told_that_the_mean_began_anew_and_may_rescale_another_one() -> None:
    estimate = estimate_of(*[10.0, 10.5, 9.5] * 10)
    assert [estimate.add(100.0) for _ in range(STRAYS)] == [False] * (STRAYS - 1) + [True]
    other = estimate_of(1.0, 2.0)
    other.rescale(10.0)
    assert (other.value, other.variance, other.count) == (15.0, 25.0, 2)
    nothing = RunningEstimate()
    nothing.rescale(10.0)
    assert nothing.value is None


def test_samples_that_stray_to_both_sides_are_noise() -> None:
    estimate = estimate_of(*[10.0, 10.5, 9.5] * 10, *[100.0, 0.0] * 10)
    assert estimate.count == 50
    assert estimate.evidence() is not None


def test_evidence_ages_and_never_has_a_future() -> None:
    estimate = estimate_of(1.0, 1.0)  # at 0 and 1 s
    assert (estimate.evidence(31.0) or Evidence()).age_s == 30.0
    assert (estimate.evidence(0.5) or Evidence(age_s=9)).age_s == 0.0


def test_a_standard_error_shrinks_with_samples_as_far_as_the_mean_remembers_them() -> None:
    assert Evidence(4.0, 1).standard_error == 2.0
    assert Evidence(4.0, 4).standard_error == 1.0
    assert Evidence(4.0, 10**9).standard_error == pytest.approx(2 / (2 / WEIGHT - 1) ** 0.5)


@pytest.mark.parametrize(
    "document",
    [None, [], [1, 2], [1.0, 0, 0.0], [-1, 1, 0], [1, 1.5, 0], [1, True, 0], [float("nan"), 1, 0], [1, 1, 1e10], "x"],
)
def test_what_is_no_evidence_is_refused(document: object) -> None:
    with pytest.raises(InvalidInputError, match="variance, samples, seconds"):
        Evidence.from_wire(document)
