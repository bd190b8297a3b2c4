"""How long an idle lane waits for more steps: until those that left together are in, or a group is as large as all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet_node.step_gathering import APART, APART_S, PATIENCE, PATIENCE_S, BatchCost, StepGathering

STEP_S = 0.03


def gathering(fixed_s: float = STEP_S, each_s: float = 0.0) -> StepGathering:
    """Of a lane whose forwards take so long, and so much longer for each step."""
    found = StepGathering()
    for steps in (1, 4, 2, 3) * 20:
        found.cost.ran(steps, fixed_s + steps * each_s)
    return found


def waited(
    gathering: StepGathering, came: dict[float, int], *, enough: int, most: int, step_s: float = STEP_S
) -> tuple[float, int]:
    """Seconds until the steps run, and how many do; ``came`` are those that wait, by when they came."""
    now = 0.0
    while True:
        have = sum(count for at, count in came.items() if at <= now)
        gathering.came(max(at for at in came if at <= now))
        wait_s = gathering.wait_s(have, enough, most, now, step_s)
        if not wait_s:
            return now, have
        now = min([now + wait_s, *(at for at in came if at > now)])


def test_as_many_as_may_run_together_run_at_once() -> None:
    assert waited(gathering(), {0.0: 4}, enough=4, most=4) == (0.0, 4)


def test_a_group_that_fell_apart_becomes_one_again() -> None:
    assert waited(gathering(), {0.0: 1, 0.5 * STEP_S: 3}, enough=4, most=4) == (0.5 * STEP_S, 4)


def test_what_comes_one_after_the_other_is_gathered_though_there_are_enough() -> None:
    apart_s = min(APART_S, APART * STEP_S)
    found = waited(gathering(), {0.0: 4, 0.9 * apart_s: 1}, enough=4, most=5)
    assert found == (0.9 * apart_s, 5)
    found = waited(gathering(), {0.0: 4, 1.1 * apart_s: 1}, enough=4, most=5)
    assert found == (pytest.approx(apart_s), 4)


@pytest.mark.parametrize(("fixed_s", "each_s"), [(0.03, 0.0), (0.02, 0.005), (0.0, 0.02)])
def test_no_longer_than_one_group_fewer_saves(fixed_s: float, each_s: float) -> None:
    """Where each step costs as much as if it ran alone, there is nothing to wait for."""
    took, have = waited(gathering(fixed_s, each_s), {0.0: 1}, enough=4, most=4)
    at_least = min(APART_S, APART * STEP_S)
    assert (took, have) == (pytest.approx(max(at_least, PATIENCE * min(STEP_S, fixed_s)), rel=0.05), 1)


def test_a_first_step_that_took_long_makes_nobody_wait_as_long() -> None:
    """It may have read its weights from a disk; the mean knows of it for a good while."""
    found = StepGathering()
    found.cost.ran(1, 60.0)
    assert waited(found, {0.0: 1}, enough=2, most=2, step_s=60.0) == (PATIENCE_S, 1)


def test_waits_that_bring_nobody_are_given_up_and_tried_again_now_and_then() -> None:
    found = gathering()
    took = [waited(found, {0.0: 1}, enough=4, most=4)[0] for _ in range(400)]
    patient = [seconds for seconds in took if seconds > 0.5 * STEP_S]
    assert all(seconds in patient for seconds in took[:3])
    assert 3 < len(patient) < 40
    assert [seconds for seconds in took[200:] if seconds in patient]


@given(st.floats(0, 1), st.floats(0, 0.5), st.lists(st.integers(1, 8), min_size=40, max_size=60))
def test_what_a_forward_costs_without_its_steps_is_found(fixed_s: float, each_s: float, sizes: list[int]) -> None:
    cost = BatchCost()
    for steps in sizes:
        cost.ran(steps, fixed_s + steps * each_s)
    if len(set(sizes)) > 1:
        assert cost.fixed_s == pytest.approx(fixed_s, abs=1e-6)
    else:
        assert cost.fixed_s == pytest.approx(fixed_s + sizes[0] * each_s)
