"""Which steps run in the event loop's own thread, and that the lane's may then not run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from meshnet_core.settle import settle
from meshnet_node.forward_lane import ForwardLane, LaneOutcome
from meshnet_node.shard_work import ShardBackend, ShardResult, ShardWork
from meshnet_node.steps_here import PAUSE_S, StepsHere
from meshnet_node.thread_team import ThreadTeam

LIMIT_S = 0.025
SHORT_S = 0.001


def test_short_steps_run_here_and_the_loop_goes_round_between_two() -> None:
    here = StepsHere(LIMIT_S)
    assert here.allows(SHORT_S, now=0.0)
    assert not here.allows(LIMIT_S, now=0.0)
    here.ran(SHORT_S, now=1.0)
    assert not here.allows(SHORT_S, now=1.0)
    here.went_round()
    assert here.allows(SHORT_S, now=1.0)


def test_after_a_long_one_there_are_none_for_a_while() -> None:
    here = StepsHere(LIMIT_S)
    here.ran(LIMIT_S, now=1.0)
    here.went_round()
    assert not here.allows(SHORT_S, now=0.99 + PAUSE_S)
    assert here.allows(SHORT_S, now=1.0 + PAUSE_S)


def test_there_are_none_without_a_limit() -> None:
    assert not StepsHere(0.0).allows(0.0, now=0.0)


class Noting:
    """A backend that notes in which thread it ran; and does ``during`` meanwhile."""

    batch_limit = 1

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.during: Callable[[], None] = lambda: None

    def forward(self, works: Sequence[ShardWork]) -> list[ShardResult | Exception]:
        self.threads.append(threading.get_ident())
        self.during()
        return [ShardResult(hidden=None, logits=None, seconds=0.0) for _ in works]

    def ran_here(self) -> list[bool]:
        return [thread == threading.get_ident() for thread in self.threads]


class Lane:
    """A lane whose clock stands still unless told."""

    def __init__(self, *, has_team: bool = False) -> None:
        self.now = 0.0
        self.ended: list[int] = []  # the threads that ended their team of threads
        team = ThreadTeam(lambda: self.ended.append(threading.get_ident())) if has_team else None
        self.lane = ForwardLane(here=StepsHere(LIMIT_S), team=team, now=lambda: self.now)
        self.backend = Noting()
        self.queued: list[int] = []  # what the lane had when an outcome was told

    def hand(self, turn: object, positions: int = 1, expected_s: float | None = SHORT_S) -> asyncio.Future[object]:
        """A frame's outcome to come; done at once where it ran here."""
        frame = ShardWork(start=0, state=None, position=0, seq_len=positions, payload=b"", wire_dtype="float32")
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()

        def told(outcome: LaneOutcome[str]) -> None:
            self.queued.append(self.lane.queued)
            settle(future, outcome)

        shard = cast(ShardBackend, self.backend)
        self.lane.hand(turn, shard, frame, lambda _: f"{turn}", told, here=expected_s)
        return future

    async def step(self, turn: object, **options: float | None) -> None:
        """One that is waited for, and the loop gone round after it."""
        await asyncio.wait_for(self.hand(turn, **options), 20)  # type: ignore[arg-type]
        await asyncio.sleep(0)

    @asynccontextmanager
    async def held_by(self, turn: object, **frame: Any) -> AsyncIterator[asyncio.Future[object]]:
        """The lane's thread runs that frame until the block is left."""
        started, goes_on = threading.Event(), threading.Event()

        def wait() -> None:
            started.set()
            assert goes_on.wait(timeout=20)

        self.backend.during = wait
        outcome = self.hand(turn, **frame)
        await asyncio.to_thread(started.wait, 20)
        self.backend.during = lambda: None
        try:
            yield outcome
        finally:
            goes_on.set()

    async def until_ended(self, times: int) -> None:
        """The lane ends its team after a frame was told."""

        def wait() -> None:
            until = time.monotonic() + 20
            while len(self.ended) < times and time.monotonic() < until:
                time.sleep(0.001)

        await asyncio.to_thread(wait)
        assert len(self.ended) == times


@pytest.fixture
async def lane() -> AsyncIterator[Lane]:
    lane = Lane()
    yield lane
    await asyncio.to_thread(lane.lane.close)


@pytest.fixture
async def team_lane() -> AsyncIterator[Lane]:
    """One whose thread has a team of threads."""
    lane = Lane(has_team=True)
    yield lane
    await asyncio.to_thread(lane.lane.close)


async def test_steps_of_the_only_session_run_here_from_the_second_on(lane: Lane) -> None:
    for _ in range(4):
        await lane.step("a")
    assert lane.backend.ran_here() == [False, True, True, True]
    assert lane.lane.batches == {1: 4}


async def test_a_step_that_ran_here_is_told_at_once(lane: Lane) -> None:
    await lane.step("a")
    assert lane.hand("a").done()
    assert lane.queued == [0, 0]


async def test_a_second_step_in_one_turn_of_the_loop_is_the_lanes(lane: Lane) -> None:
    await lane.step("a")
    first, second = lane.hand("a"), lane.hand("a")
    assert (first.done(), second.done()) == (True, False)
    await asyncio.wait_for(second, 20)
    assert lane.backend.ran_here() == [False, True, False]


@pytest.mark.parametrize("options", [{"expected_s": None}, {"expected_s": LIMIT_S}])
async def test_what_is_long_or_not_known_is_the_lanes(lane: Lane, options: dict[str, float | None]) -> None:
    await lane.step("a")
    await lane.step("a", **options)
    assert lane.backend.ran_here() == [False, False]


async def test_none_run_here_while_another_sessions_steps_are_about(lane: Lane) -> None:
    await lane.step("a")
    await lane.step("b")
    await lane.step("a")
    lane.lane.forget("b")
    await lane.step("a")
    assert lane.backend.ran_here() == [False, False, False, True]


async def test_none_run_here_while_the_lane_has_something_to_do(lane: Lane) -> None:
    await lane.step("a")
    async with lane.held_by("b", positions=100, expected_s=None) as chunk:
        step = lane.hand("a")
        assert not step.done()
    await asyncio.wait_for(asyncio.gather(chunk, step), 20)
    assert lane.backend.ran_here() == [False, False, False]


async def test_one_that_was_long_stops_them_for_a_while(lane: Lane) -> None:
    def last() -> None:
        lane.now += LIMIT_S

    await lane.step("a")
    lane.backend.during = last
    await lane.step("a")
    lane.backend.during = lambda: None
    await lane.step("a")
    lane.now += PAUSE_S
    await lane.step("a")  # nobody's step has run a moment ago
    await lane.step("a")
    assert lane.backend.ran_here() == [False, True, False, False, True]


async def test_a_step_that_fails_here_leaves_the_lane_to_others(lane: Lane) -> None:
    def fail() -> None:
        raise RuntimeError("on purpose")

    await lane.step("a")
    lane.backend.during = fail
    with pytest.raises(RuntimeError, match="on purpose"):
        await lane.step("a")
    lane.backend.during = lambda: None
    await asyncio.sleep(0)
    await lane.step("a")
    assert lane.backend.ran_here() == [False, True, True]


async def test_another_thread_finds_the_lane_taken_while_a_step_runs_here(lane: Lane) -> None:
    asked, told = threading.Event(), []

    def ask() -> None:
        asked.set()
        told.append(lane.lane.queued)

    asker = threading.Thread(target=ask)

    def during() -> None:
        asker.start()
        assert asked.wait(timeout=20)
        assert told == []

    await lane.step("a")
    lane.backend.during = during
    await lane.step("a")
    asker.join(timeout=20)
    assert told == [0]


async def test_the_lane_ends_its_team_before_steps_run_here_and_once(team_lane: Lane) -> None:
    lane = team_lane
    await lane.step("a")
    assert lane.ended == []
    await lane.step("a")
    await lane.until_ended(1)
    for _ in range(3):
        await lane.step("a")
    assert lane.backend.ran_here() == [False, False, True, True, True]
    assert lane.ended == [lane.backend.threads[0]]


async def test_the_team_here_is_ended_here_before_the_lane_runs(team_lane: Lane) -> None:
    lane = team_lane
    await lane.step("a")
    await lane.step("a")
    await lane.until_ended(1)
    await lane.step("a")
    ended_before: list[int] = []
    lane.backend.during = lambda: ended_before.extend(lane.ended)
    chunk = lane.hand("b", positions=100, expected_s=None)
    assert lane.ended[1:] == [threading.get_ident()]
    await asyncio.wait_for(chunk, 20)
    assert ended_before == lane.ended
    await lane.step("a")  # whose team the lane ends again
    await lane.until_ended(3)
    await lane.step("a")
    assert lane.backend.ran_here() == [False, False, True, False, False, True]
    assert lane.ended[2] == lane.backend.threads[0]


async def test_the_lane_keeps_its_team_where_more_waits_for_it(team_lane: Lane) -> None:
    lane = team_lane
    await lane.step("a")
    async with lane.held_by("a") as step:
        chunks = [lane.hand("b", positions=100, expected_s=None) for _ in range(2)]
    await asyncio.wait_for(asyncio.gather(step, *chunks), 20)
    assert lane.ended == []
    assert lane.backend.ran_here() == [False] * 4
