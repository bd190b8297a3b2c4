"""Long frames on the forward lane, which run in pieces between steps. The backends are scripted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from meshnet_core.frames import MAX_DRAFT
from meshnet_gateway.step_frames import MOST_AGAIN
from meshnet_node.forward_lane import LaneTiming
from meshnet_node.session_state import SessionState
from meshnet_node.shard_work import ShardBackend, ShardResult, ShardWork
from scripted_lane import Lane, ScriptedBackend, closed_after, work


@pytest.fixture
async def still() -> AsyncIterator[Lane]:
    """A lane whose clock stands still: a step that ran once is always just over."""
    async for lane in closed_after(Lane(now=lambda: 0.0)):
        yield lane


LONG = bytes(range(40, 140))
"""A payload of one byte a position."""


def long_work(**changes: Any) -> ShardWork:
    return replace(ShardWork(0, cast(SessionState, object()), 50, len(LONG), LONG, "float32", sample=1), **changes)


class EchoBackend(ScriptedBackend):
    """Gives every payload back as hidden states, in capitals as it were."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[ShardWork] = []
        self.run_free()

    def forward(self, works: Sequence[ShardWork]) -> list[ShardResult | Exception]:
        self.works += works
        self.started.release()
        assert self.gate.acquire(timeout=20)
        return [ShardResult(memoryview(bytes(work.payload) * 2), None, 0.0) for work in works]


async def run_long(lane: Lane, echo: EchoBackend, given: ShardWork) -> tuple[ShardResult, LaneTiming]:
    """A long frame right after a step; the works of the echo are its pieces."""
    await lane.lane.run("step", cast(ShardBackend, echo), work("s"), lambda result: result)
    echo.works.clear()
    return await lane.lane.run("long", cast(ShardBackend, echo), given, lambda result: result)


async def test_beside_steps_a_long_frame_runs_in_pieces_and_its_caller_sees_one(still: Lane) -> None:
    echo = EchoBackend()
    held = cast(SessionState, object())
    result, timing = await run_long(still, echo, long_work(held=held))
    assert result.hidden == b"".join(bytes(piece.payload) * 2 for piece in echo.works)
    assert len(echo.works) > 1
    assert b"".join(bytes(piece.payload) for piece in echo.works) == LONG
    ends = [50]
    for piece in echo.works:
        assert piece.position == ends[-1]
        ends.append(piece.position + piece.seq_len)
    assert ends[-1] == 150
    assert [piece.sample for piece in echo.works] == [0] * (len(echo.works) - 1) + [1]
    assert [piece.held for piece in echo.works] == [held] + [None] * (len(echo.works) - 1)
    assert timing.pieces == len(echo.works)
    assert min(timing.queue_s, timing.forward_s, timing.finish_s) >= 0


async def test_a_frame_of_as_many_drafts_as_there_may_be_is_a_step_too(still: Lane) -> None:
    """So that prefills run in pieces beside it, and it is not held back as they are."""
    echo = EchoBackend()
    most = MAX_DRAFT + MOST_AGAIN + 1
    verify = replace(long_work(verify=True, sample=MAX_DRAFT + 1), seq_len=most, payload=LONG[:most])
    await still.lane.run("drafts", cast(ShardBackend, echo), verify, lambda result: result)
    echo.works.clear()
    await still.lane.run("long", cast(ShardBackend, echo), long_work(), lambda result: result)
    assert len(echo.works) > 1


@pytest.mark.parametrize(
    "changes", [{"exact": True}, {"state": None, "position": 0}, {"sample": 2}, {"payload": LONG[1:]}]
)
async def test_a_long_frame_that_pieces_would_change_runs_whole(still: Lane, changes: dict[str, Any]) -> None:
    echo = EchoBackend()
    given = long_work(**changes)
    await run_long(still, echo, given)
    assert echo.works == [given]


async def test_a_long_frame_without_steps_about_runs_whole(still: Lane) -> None:
    echo = EchoBackend()
    given = long_work()
    await still.lane.run("long", cast(ShardBackend, echo), given, lambda result: result)
    assert echo.works == [given]


async def test_a_piece_that_fails_ends_the_frame(still: Lane) -> None:
    class Failing(EchoBackend):
        def forward(self, works: Sequence[ShardWork]) -> list[ShardResult | Exception]:
            results = super().forward(works)
            return [KeyError("second piece")] if len(self.works) == 2 else results

    echo = Failing()
    with pytest.raises(KeyError, match="second piece"):
        await run_long(still, echo, long_work())
    assert len(echo.works) == 2
    assert still.lane.queued == 0


async def test_a_frame_withdrawn_while_a_piece_runs_does_not_go_on(still: Lane) -> None:
    echo = EchoBackend()
    shard = cast(ShardBackend, echo)
    await still.lane.run("step", shard, work("s"), lambda result: result)
    echo.gate = threading.Semaphore(0)
    echo.started = threading.Semaphore(0)
    echo.works.clear()
    task = asyncio.create_task(still.lane.run("long", shard, long_work(), lambda result: result))
    await asyncio.to_thread(echo.started.acquire)
    still.lane.withdraw("long")
    echo.run_free()
    await asyncio.wait([task], timeout=20)
    assert task.cancelled()
    assert len(echo.works) == 1
    assert still.lane.queued == 0
