"""Whose frames a lane runs next: turns, batches of what waits, and prefills that leave steps half of the time."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import dataclass

import pytest

from meshnet_node.lane_schedule import (
    FIRST_PIECE,
    HOLD,
    PIECE,
    STEP_POSITIONS,
    STEPS_LINGER_S,
    LaneSchedule,
    Taken,
    is_step,
)
from meshnet_node.step_gathering import APART, APART_S, PATIENCE


@dataclass
class ScriptedJob:
    """A frame by name; ``positions`` are those left."""

    name: str
    positions: int = 1
    batch: str | None = None
    divisible: bool = True
    batch_limit: int = 4
    hops: int = 1

    def __post_init__(self) -> None:
        self.is_step = is_step(self.positions)


def step(name: str, batch: str | None = "b") -> ScriptedJob:
    return ScriptedJob(name, batch=batch)


class Session:
    """Whose frames they are."""


class Lane:
    """A lane without threads: runs what a schedule gives it, on a clock of its own."""

    def __init__(self) -> None:
        self.schedule: LaneSchedule[ScriptedJob] = LaneSchedule()
        self.now = 0.0
        self.step_s = 0.03
        self.position_s = 0.001

    def put(self, *jobs: ScriptedJob) -> None:
        """Queue jobs, each under the turn that its name's first letter says."""
        for job in jobs:
            self.schedule.put(job.name[0], job, self.now)

    def take(self) -> Taken[ScriptedJob]:
        """What is next, after the wait that the schedule asks for."""
        taken = self.schedule.take(self.now)
        while isinstance(taken, float):
            self.now += taken
            taken = self.schedule.take(self.now)
        assert isinstance(taken, Taken)
        return taken

    def run(self) -> tuple[str, int]:
        """Run what is next: whose, and how many positions of each."""
        taken = self.take()
        took = self.step_s if taken.jobs[0].is_step else taken.positions * self.position_s
        self.now += took
        self.schedule.ran(taken, took, self.now)
        for turn, job in zip(taken.turns, taken.jobs, strict=True):
            job.positions -= taken.positions
            if job.positions:
                self.schedule.put_back(turn, job)
        return "+".join(job.name for job in taken.jobs), taken.positions


@pytest.fixture
def lane() -> Lane:
    return Lane()


@pytest.mark.parametrize("batch", ["b", None])
def test_a_step_taken_alone_leaves_what_one_that_waited_its_turn_does(batch: str | None) -> None:
    taken: list[list[Taken[ScriptedJob]]] = [[], []]
    lanes = [Lane(), Lane()]
    for lane, takes in zip(lanes, taken, strict=True):
        lane.put(step("a1", batch))
        lane.run()
        for name in ("a2", "a3"):
            job = step(name, batch)
            assert lane.schedule.is_only_for("a", lane.now)
            if lane is lanes[0]:
                takes.append(lane.schedule.take_alone("a", job, lane.now))
            else:
                lane.put(job)
                takes.append(lane.take())
            lane.now += lane.step_s
            lane.schedule.ran(takes[-1], lane.step_s, lane.now)
    assert taken[0] == taken[1]
    assert lanes[0].schedule == lanes[1].schedule


def test_a_lane_is_only_for_whose_steps_alone_ran_a_moment_ago(lane: Lane) -> None:
    assert not lane.schedule.is_only_for("a", lane.now)
    lane.put(step("a1"))
    assert not lane.schedule.is_only_for("a", lane.now)
    lane.run()
    assert lane.schedule.is_only_for("a", lane.now)
    assert not lane.schedule.is_only_for("b", lane.now)
    lane.put(step("b1"))
    lane.run()
    assert not lane.schedule.is_only_for("a", lane.now)
    lane.schedule.forget("b")
    assert lane.schedule.is_only_for("a", lane.now)
    assert not lane.schedule.is_only_for("a", lane.now + STEPS_LINGER_S)


def test_an_empty_schedule_has_nothing_to_run(lane: Lane) -> None:
    assert lane.schedule.take(0.0) is None
    assert len(lane.schedule) == 0


# -- batches ----------------------------------------------------------------------------------------------------------


def test_steps_that_wait_run_together_up_to_the_limit_and_nobody_is_waited_for(lane: Lane) -> None:
    lane.put(*(step(f"{turn}0") for turn in "abcdef"))
    assert [lane.run()[0], lane.run()[0]] == ["a0+b0+c0+d0", "e0+f0"]
    lane.put(step("g0"))
    assert lane.run()[0] == "g0"


def test_sessions_are_spread_over_the_hops_of_their_route(lane: Lane) -> None:
    """With all eight in one batch one of two hops would always be idle."""
    lane.put(*(ScriptedJob(turn, batch="b", batch_limit=32, hops=2) for turn in "abcdefgh"))
    assert [lane.run()[0], lane.run()[0]] == ["a+b+c+d", "e+f+g+h"]


def test_steps_that_come_in_one_after_the_other_are_gathered_for_a_moment(lane: Lane) -> None:
    lane.put(*(step(turn) for turn in "abc"))
    assert lane.run()[0] == "a+b+c"
    lane.put(step("a"))
    wait = lane.schedule.take(lane.now)
    assert isinstance(wait, float)
    lane.now += wait / 2
    lane.put(step("b"))
    assert isinstance(lane.schedule.take(lane.now), float)
    lane.put(step("c"))
    assert lane.run()[0] == "a+b+c"  # none is to come: at once
    lane.put(step("a"))
    began = lane.now
    assert lane.run()[0] == "a"
    assert lane.now - began == pytest.approx(lane.step_s * (1 + PATIENCE))


def test_groups_that_fell_apart_become_as_large_as_all_can_be(lane: Lane) -> None:
    """Eight sessions over two hops: what waits for less than a forward is one group of four, not three and one."""
    together = [ScriptedJob(turn, batch="b", batch_limit=32, hops=2) for turn in "abcdefgh"]
    lane.put(*together)
    assert [lane.run()[0], lane.run()[0]] == ["a+b+c+d", "e+f+g+h"]
    again = [ScriptedJob(turn, batch="b", batch_limit=32, hops=2) for turn in "abcd"]
    lane.put(again[0])
    lane.now += lane.step_s / 2
    assert isinstance(lane.schedule.take(lane.now), float)
    lane.put(*again[1:])
    assert lane.run()[0] == "a+b+c+d"


def test_a_long_frame_waits_for_no_group(lane: Lane) -> None:
    lane.put(*(step(turn) for turn in "abc"))
    lane.run()
    lane.put(step("a"), ScriptedJob("p0", 100))
    began = lane.now
    assert lane.run()[0] == "a"
    assert lane.now - began == pytest.approx(lane.step_s + min(APART_S, APART * lane.step_s))


def test_but_one_does_that_is_held_back_for_steps_anyway(lane: Lane) -> None:
    lane.put(*(step(turn) for turn in "abc"), ScriptedJob("p0", 256, divisible=False))
    assert [lane.run()[0], lane.run()[0]] == ["a+b+c", "p0"]
    lane.put(step("a"), ScriptedJob("p1", 256, divisible=False))
    began = lane.now
    assert lane.run()[0] == "a"
    assert lane.now - began == pytest.approx(lane.step_s * (1 + PATIENCE))


@pytest.mark.parametrize("batch", ["other", None])
def test_nor_do_steps_that_cannot_be_in_the_group(lane: Lane, batch: str | None) -> None:
    """Of another shard on the same device, or of a family whose steps run alone."""
    lane.put(*(step(turn) for turn in "abc"))
    lane.run()
    lane.put(step("a"), step("x", batch))
    began = lane.now
    assert lane.run()[0] == "a"
    assert lane.now - began == pytest.approx(lane.step_s + min(APART_S, APART * lane.step_s))


def test_a_session_that_ends_while_its_step_runs_is_not_waited_for(lane: Lane) -> None:
    lane.put(step("a"), step("b"))
    taken = lane.take()
    lane.schedule.forget("a")
    lane.now += lane.step_s
    lane.schedule.ran(taken, lane.step_s, lane.now)
    lane.put(step("b"))
    began = lane.now
    assert lane.run()[0] == "b"
    assert lane.now - began == pytest.approx(lane.step_s)


def test_only_frames_of_one_batch_run_together_and_one_of_each_session(lane: Lane) -> None:
    lane.put(step("a0"), step("a1"), step("b0", "other"), step("c0", None), step("d0"))
    assert [lane.run()[0] for _ in range(4)] == ["a0+d0", "b0", "c0", "a1"]


def test_a_session_that_was_in_a_batch_stands_at_the_end(lane: Lane) -> None:
    lane.put(step("a0"), step("a1"), step("b0"), step("c0", None))
    assert [lane.run()[0] for _ in range(3)] == ["a0+b0", "c0", "a1"]


def test_what_is_removed_does_not_run(lane: Lane) -> None:
    lane.put(step("a0"), step("b0"), step("a1"))
    assert [job.name for job in lane.schedule.remove("a")] == ["a0", "a1"]
    assert lane.schedule.remove("nobody") == ()
    assert lane.run()[0] == "b0"


@pytest.mark.parametrize("batch", ["b", None])
def test_sessions_that_have_gone_are_forgotten_though_their_steps_run_alone(lane: Lane, batch: str | None) -> None:
    known: weakref.WeakSet[Session] = weakref.WeakSet()
    for _ in range(500):
        known.add(session := Session())
        lane.schedule.put(session, step("a", batch), lane.now)
        del session
        lane.run()
    gc.collect()
    assert len(known) <= STEPS_LINGER_S / lane.step_s + 2


# -- prefills beside steps --------------------------------------------------------------------------------------------


def test_without_steps_a_long_frame_runs_whole(lane: Lane) -> None:
    lane.put(ScriptedJob("p0", 256), ScriptedJob("p1", 200))
    assert [lane.run(), lane.run()] == [("p0", 256), ("p1", 200)]


def test_beside_steps_a_long_frame_runs_in_pieces_after_each_of_which_the_steps_come_first(lane: Lane) -> None:
    lane.put(step("a0"), ScriptedJob("p0", 200), step("b0"))
    ran = []
    while not ran or lane.schedule:
        ran.append(lane.run())
        if ran[-1][0] == "a0+b0" and len(ran) < 12:
            lane.put(step("a0"), step("b0"))
    names = [name for name, _ in ran]
    pieces = [positions for name, positions in ran if name == "p0"]
    assert names[0] == "a0+b0"
    assert pieces[0] == FIRST_PIECE
    assert sum(pieces) == 200
    assert len(pieces) > 2
    assert all(one != other for one, other in itertools.pairwise(names) if one == "p0")


@pytest.mark.parametrize("position_s", [0.0002, 0.001, 0.004])
def test_pieces_become_about_as_long_as_some_batches_of_steps(lane: Lane, position_s: float) -> None:
    lane.position_s = position_s
    lane.put(step("a0"), ScriptedJob("p0", 100_000))
    pieces = []
    while len(pieces) < 10:
        name, positions = lane.run()
        if name == "p0":
            pieces.append(positions)
        else:
            lane.put(step("a0"))
    assert pieces[-1] == pytest.approx(max(STEP_POSITIONS, PIECE * lane.step_s / position_s), rel=0.1)


@pytest.mark.parametrize(
    ("steppers", "prefills", "share"), [(1, 1, 1 / 2), (4, 1, 1 / 2), (3, 3, 1 / 2), (1, 3, 1 / 4), (2, 3, 2 / 5)]
)
def test_steps_have_half_of_a_lane_whose_prefills_never_end_or_a_sessions_share_if_they_are_fewer(
    lane: Lane, steppers: int, prefills: int, share: float
) -> None:
    spent = {"steps": 0.0, "prefills": 0.0}
    lane.put(*(step(turn) for turn in "abcd"[:steppers]), *(ScriptedJob(turn, 10**9) for turn in "pqr"[:prefills]))
    while lane.now < 60:
        began = lane.now
        name, _ = lane.run()
        if name[0] < "p":
            lane.put(*(step(turn) for turn in name.split("+")))
        spent["steps" if name[0] < "p" else "prefills"] += lane.now - began
    assert spent["steps"] / lane.now == pytest.approx(share, abs=0.07)


def test_prefills_of_several_sessions_take_turns(lane: Lane) -> None:
    lane.put(step("a0"), ScriptedJob("p0", 500), ScriptedJob("q0", 500))
    seen = []
    for at in range(1, 13):
        name, _ = lane.run()
        if name.startswith("a"):
            lane.put(step(f"a{at}"))
        else:
            seen.append(name)
    assert seen[:4] == ["p0", "q0", "p0", "q0"]


def test_after_a_frame_that_must_run_whole_the_steps_get_as_much_time(lane: Lane) -> None:
    lane.put(step("a0"), ScriptedJob("p0", 256, divisible=False))
    assert [lane.run()[0], lane.run()] == ["a0", ("p0", 256)]
    lane.put(ScriptedJob("p1", 256, divisible=False))
    steps = 0
    while True:
        lane.put(step(f"a{steps + 1}"))
        name, _ = lane.run()
        if name == "p1":
            break
        steps += 1
    assert steps == pytest.approx(0.256 / lane.step_s, abs=1)


def test_steps_that_waited_for_a_long_frame_all_count_though_it_took_longer_than_they_linger(lane: Lane) -> None:
    """Three sessions decode and three prefill, so that the steps are owed all of what a prefill took."""
    lane.position_s = 0.01
    lane.put(*(step(turn) for turn in "abc"))
    lane.run()
    lane.put(*(ScriptedJob(turn, 256, divisible=False) for turn in "pqr"))
    taken = lane.take()
    lane.put(step("a"), step("b"))
    lane.now += 2.5
    lane.put(step("c"))
    lane.schedule.ran(taken, 2.5, lane.now)
    steps_s = 0.0
    while True:
        began = lane.now
        name, _ = lane.run()
        if name in "pqr":
            break
        steps_s += lane.now - began
        lane.put(*(step(turn) for turn in name.split("+")))
    assert steps_s == pytest.approx(2.5, abs=0.1)


def test_steps_that_are_elsewhere_meanwhile_are_waited_for_but_not_for_ever(lane: Lane) -> None:
    lane.put(step("a0"), ScriptedJob("p0", 2560, divisible=False))
    lane.run()
    lane.run()
    lane.put(ScriptedJob("p1", 256, divisible=False))
    wait = lane.schedule.take(lane.now)
    assert isinstance(wait, float)
    assert wait == pytest.approx(HOLD * 2.56)
    lane.now += wait
    assert lane.run()[0] == "p1"


def test_once_the_steps_are_over_the_rest_runs_whole_and_at_once(lane: Lane) -> None:
    lane.put(step("a0"), ScriptedJob("p0", 500))
    assert [lane.run()[0], lane.run()] == ["a0", ("p0", FIRST_PIECE)]
    lane.now += STEPS_LINGER_S
    assert lane.run() == ("p0", 500 - FIRST_PIECE)


def test_once_the_session_that_made_steps_is_over_the_rest_runs_whole_and_at_once(lane: Lane) -> None:
    """The next question often comes the moment an answer has ended."""
    lane.put(step("a0"), ScriptedJob("p0", 500))
    assert [lane.run()[0], lane.run()] == ["a0", ("p0", FIRST_PIECE)]
    assert isinstance(lane.schedule.take(lane.now), float)
    lane.schedule.forget("a")
    began = lane.now
    assert lane.take().positions == 500 - FIRST_PIECE
    assert lane.now == began


def test_a_session_withdrawn_between_two_pieces_is_gone(lane: Lane) -> None:
    lane.put(step("a0"), ScriptedJob("p0", 500), ScriptedJob("p1", 500))
    lane.run()
    lane.run()
    assert [job.name for job in lane.schedule.remove("p")] == ["p0", "p1"]
    assert lane.schedule.take(lane.now) is None
