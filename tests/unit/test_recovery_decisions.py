"""What follows a failure, as a table; the memory of blame; the frames of a replay: pure, or by a clock of the test."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshnet_core.clock import ManualClock
from meshnet_core.errors import (
    BadFrameError,
    CacheMissError,
    DeadlineError,
    DrainingError,
    HopFailedError,
    HopUnreachableError,
    LayersUnavailableError,
    MeshnetError,
    MissReason,
    ProtocolMismatchError,
    TrackerUnreachableError,
)
from meshnet_core.frames import Frame
from meshnet_gateway.blame import BACKOFF_S, MAX_BACKOFF_S, MAX_NODES, REMEMBERED_S, BlameMemory
from meshnet_gateway.epoch_frames import EpochFrames
from meshnet_gateway.prefill_cut import PrefillCut
from meshnet_gateway.recovery import (
    BAD_FRAMES_BEFORE_FAIL,
    BUSY_RETRIES,
    MAX_ATTEMPTS,
    MAX_RETRIES,
    MISSES_BEFORE_STATELESS,
    STATELESS_TOKENS,
    Action,
    Fail,
    History,
    Probe,
    Probed,
    Replay,
    RePrefill,
    Reroute,
    Retry,
    Stateless,
    next_action,
    tries_cache_again,
)

MISS = CacheMissError("m", reason=MissReason.EVICTED)
OTHER_LAYERS = CacheMissError("m", reason=MissReason.RANGE_MISMATCH)
GONE, LATE = HopUnreachableError("gone"), DeadlineError("late")
A, B = frozenset({"a"}), frozenset({"b"})
BROKEN, LACKING = HopFailedError("broken"), LayersUnavailableError("layers 2-3 lack")
TRACKERLESS = TrackerUnreachableError("no tracker")


# -- the decision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "history", "expected"),
    [
        (MISS, History(), RePrefill()),
        (MISS, History(failures=(MISS,) * MISSES_BEFORE_STATELESS), Stateless()),
        (OTHER_LAYERS, History(), Reroute(B, blamed="b")),
        (OTHER_LAYERS, History(failures=(MISS,), excluded=A), Reroute(A | B, 0.2, blamed="b")),
        (GONE, History(), Retry(0.0)),
        (GONE, History(retries=MAX_RETRIES), Probe()),
        (GONE, History(retries=MAX_RETRIES, probed=Probed.BUSY), Retry(0.1)),
        (GONE, History(retries=MAX_RETRIES, probed=Probed.IDLE), Reroute(B)),
        (GONE, History(retries=MAX_RETRIES, probed=Probed.GONE), Reroute(B, blamed="b")),
        (GONE, History(retries=MAX_RETRIES + BUSY_RETRIES), Probe()),
        (GONE, History(retries=MAX_RETRIES + BUSY_RETRIES, probed=Probed.BUSY), Reroute(B)),
        (LATE, History(), Probe()),
        (LATE, History(probed=Probed.BUSY), Retry(0.1)),
        (LATE, History(probed=Probed.IDLE), Reroute(B)),
        (LATE, History(probed=Probed.GONE), Reroute(B, blamed="b")),
        (LATE, History(retries=BUSY_RETRIES, probed=Probed.BUSY), Reroute(B)),
        (LATE, History(excluded=A, probed=Probed.GONE), Reroute(A | B, blamed="b")),
        (DrainingError("d"), History(), Reroute(B)),
        (ProtocolMismatchError("p"), History(), Reroute(B, blamed="b")),
        (BROKEN, History(), RePrefill()),
        (BROKEN, History(failures=(BROKEN,)), Reroute(B, 0.2, blamed="b")),
        (LACKING, History(lacking_s=0.0), Fail(LACKING)),
        (LACKING, History(failures=(GONE,), excluded=B, lacking_s=0.0), Reroute(frozenset(), 0.2)),
        (LACKING, History(failures=(GONE,), excluded=B, begun=False), Reroute(frozenset(), 0.2)),
        (LACKING, History(failures=(GONE,), begun=False), Fail(LACKING)),
        (TRACKERLESS, History(failures=(GONE,), begun=False), Reroute(frozenset(), 0.2)),
        (LACKING, History(failures=(LACKING,) * 50, lacking_s=56.0, patience_s=60.0), Reroute(frozenset(), 3.0)),
        (LACKING, History(failures=(GONE,), lacking_s=60.0, patience_s=60.0), Fail(LACKING)),
        (LACKING, History(failures=(BROKEN, LACKING), lacking_s=60.0, patience_s=60.0), Fail(BROKEN)),
        (GONE, History(failures=(LACKING,) * 50, lacking_s=59.0, patience_s=60.0), Retry(0.0)),
        (GONE, History(failures=(LACKING,), lacking_s=60.0, patience_s=60.0), Fail(LACKING)),
        (GONE, History(failures=(LACKING,) * MAX_ATTEMPTS), Fail(LACKING)),
        (MISS, History(failures=(LACKING,) * MAX_ATTEMPTS), Fail(MISS)),
    ],
)
def test_what_follows_a_failure_of_node_b(failure: MeshnetError, history: History, expected: Action) -> None:
    assert next_action(failure, "b", history) == expected


def test_a_bad_frame_that_was_not_cut_on_its_way_fails() -> None:
    failure = BadFrameError("no")
    assert next_action(failure, "b", History()) == Retry()
    for before, wait_s in zip(range(BAD_FRAMES_BEFORE_FAIL), (0.0, 0.2, 0.4), strict=True):
        history = History(retries=MAX_RETRIES, failures=(failure,) * before)
        assert next_action(failure, "b", history) == RePrefill(wait_s)
    assert next_action(failure, "b", History(failures=(failure,) * BAD_FRAMES_BEFORE_FAIL)) == Retry()
    last = History(retries=MAX_RETRIES, failures=(failure, GONE) * BAD_FRAMES_BEFORE_FAIL)
    assert next_action(failure, "b", last) == Fail(failure)


def test_without_anybody_to_ask_nobody_is_probed() -> None:
    assert next_action(LATE, None, History()) == Reroute(frozenset())


@pytest.mark.parametrize("failure", [GONE, LATE])
def test_who_reports_a_second_node_that_answers_us_is_left_out_itself(failure: MeshnetError) -> None:
    """One link that is broken may be either end's fault; two of them are the end's that they share."""
    idle = History(retries=MAX_RETRIES, probed=Probed.IDLE)
    assert next_action(failure, "b", idle, "a") == Reroute(B, doubt=("a", "b"))
    again = replace(idle, excluded=B, doubts=frozenset({("a", "b")}))
    assert next_action(failure, "c", again, "a") == Reroute(A, blamed="a")
    assert next_action(failure, "c", again, "other") == Reroute(B | {"c"}, doubt=("other", "c"))
    assert next_action(failure, "c", again) == Reroute(B | {"c"})  # we ourselves did not reach it


def test_a_cache_is_tried_again_less_and_less_often() -> None:
    assert not tries_cache_again(STATELESS_TOKENS - 1, 0)
    assert tries_cache_again(STATELESS_TOKENS, 0)
    assert not tries_cache_again(2 * STATELESS_TOKENS - 1, 1)
    assert tries_cache_again(4 * STATELESS_TOKENS, 2)


@pytest.mark.parametrize("failure", [MISS, GONE, LATE, BROKEN, DrainingError("d")])
def test_whatever_fails_without_end_ends(failure: MeshnetError) -> None:
    history, steps = History(stateless=isinstance(failure, CacheMissError)), 0
    while not isinstance(next_action(failure, "b", history), Fail):
        history = History(failures=(*history.failures, failure), stateless=history.stateless)
        steps += 1
        assert steps <= MAX_ATTEMPTS


# -- the memory of blame ----------------------------------------------------------------------------------------------


def test_blame_lasts_longer_each_time_and_is_forgiven_and_forgotten() -> None:
    clock = ManualClock()
    memory = BlameMemory(clock)
    memory.blame("a")
    assert memory.excluded() == {"a"}
    clock.advance(BACKOFF_S)
    assert memory.excluded() == frozenset()
    memory.blame("a")
    clock.advance(2 * BACKOFF_S - 0.1)
    assert memory.excluded() == {"a"}
    memory.forgive("a")
    assert memory.excluded() == frozenset()
    for _ in range(12):
        memory.blame("a")
    clock.advance(MAX_BACKOFF_S - 1)
    assert memory.excluded() == {"a"}
    clock.advance(REMEMBERED_S)
    assert memory.excluded() == frozenset()
    assert len(memory) == 0


def test_blame_is_bounded() -> None:
    memory = BlameMemory(ManualClock())
    for index in range(MAX_NODES + 10):
        memory.blame(f"n{index}")
    assert len(memory) == MAX_NODES
    assert "n9" not in memory.excluded()
    assert f"n{MAX_NODES + 9}" in memory.excluded()


# -- frames of a replay -----------------------------------------------------------------------------------------------


def shape(frames: list[Frame]) -> list[tuple[str, int, int, int]]:
    return [(frame.phase.value, frame.position, frame.seq_len, frame.sample) for frame in frames]


def test_an_exact_replay_keeps_the_first_boundaries() -> None:
    make = EpochFrames("s-1", 1, 0, 1000, cache=True)
    prompt, answer = tuple(range(10)), (50, 51, 52)
    exact = list(make.prefill(prompt, answer, PrefillCut((4,)), Replay.EXACT))
    first = list(make.prefill(prompt, (), PrefillCut((4,)), Replay.EXACT))
    assert shape(exact) == [
        ("prefill", 0, 4, 0),
        ("prefill", 4, 4, 0),
        ("prefill", 8, 2, 0),
        ("decode", 10, 1, 0),
        ("decode", 11, 1, 0),
        ("decode", 12, 1, 1),
    ]
    assert shape(first) == [("prefill", 0, 4, 0), ("prefill", 4, 4, 0), ("prefill", 8, 2, 1)]
    assert [frame.body for frame in exact[:3]] == [frame.body for frame in first]
    fast = list(make.prefill(prompt, answer, PrefillCut((8,)), Replay.FAST))
    assert shape(fast) == [
        ("prefill", 0, 8, 0),
        ("prefill", 8, 5, 1),
    ]
