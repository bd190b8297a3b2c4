"""The forward lane: whose turn it is, who gets which error, and how it ends. The backends are scripted."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, cast
from unittest.mock import ANY

import pytest
import torch

from meshnet_core.frames import MAX_DRAFT
from meshnet_gateway.step_frames import MOST_AGAIN
from meshnet_node.cpu_threads import take_cpu_threads
from meshnet_node.forward_lane import ForwardLane, LaneTiming
from meshnet_node.session_state import SessionState
from meshnet_node.shard_work import ShardBackend, ShardResult, ShardWork


class ScriptedBackend:
    """Notes the batches it is given; each waits for the gate. A payload that names an error is answered with it."""

    def __init__(self, batch_limit: int = 1) -> None:
        self.batch_limit = batch_limit
        self.batches: list[list[str]] = []
        self.threads: set[str] = set()
        self.gate = threading.Semaphore(0)
        self.started = threading.Semaphore(0)
        self.answer: Callable[[list[str]], list[ShardResult | Exception]] = lambda names: [result() for _ in names]

    def forward(self, works: Sequence[ShardWork]) -> list[ShardResult | Exception]:
        names = [bytes(work.payload).decode() for work in works]
        self.batches.append(names)
        self.threads.add(threading.current_thread().name)
        self.started.release()
        assert self.gate.acquire(timeout=20)
        return self.answer(names)

    def batch_key(self, work: ShardWork) -> object:
        return None if work.exact else "any"

    def let(self, batches: int = 1) -> None:
        """Let some batches through."""
        self.gate.release(batches)

    def run_free(self) -> None:
        self.let(10_000)

    @property
    def order(self) -> list[str]:
        return [name for batch in self.batches for name in batch]


def result() -> ShardResult:
    return ShardResult(hidden=None, logits=None, seconds=0.0)


def work(name: str) -> ShardWork:
    return ShardWork(start=0, state=None, position=0, seq_len=1, payload=name.encode(), wire_dtype="float32")


class Lane:
    """A lane with the tasks that wait for it."""

    def __init__(self, **options: Any) -> None:
        self.lane = ForwardLane("lane-under-test", **options)
        self.backend = ScriptedBackend()
        self.tasks: list[asyncio.Task[Any]] = []

    def submit(
        self,
        turn: object,
        name: str,
        backend: ScriptedBackend | None = None,
        finish: Callable[[ShardResult], object] | None = None,
        exact: bool = False,
    ) -> asyncio.Task[Any]:
        run_on = cast(ShardBackend, backend or self.backend)
        frame = replace(work(name), exact=exact)
        task = asyncio.create_task(self.lane.run(turn, run_on, frame, finish or (lambda _: name)))
        self.tasks.append(task)
        return task

    async def occupy(self) -> asyncio.Task[Any]:
        """A frame that runs and waits for the gate, so that what is submitted next is queued behind it."""
        task = self.submit("first", "first")
        await asyncio.to_thread(self.backend.started.acquire)
        return task

    async def queue(self, *frames: tuple[object, str]) -> None:
        """Submit (turn, name) pairs, in order."""
        for turn, name in frames:
            self.submit(turn, name)
            await asyncio.sleep(0)

    async def finish(self) -> list[Any]:
        self.backend.run_free()
        return await asyncio.wait_for(asyncio.gather(*self.tasks, return_exceptions=True), 20)


@pytest.fixture
async def lane() -> AsyncIterator[Lane]:
    async for lane in _closed_after(Lane()):
        yield lane


@pytest.fixture
async def still() -> AsyncIterator[Lane]:
    """A lane whose clock stands still: a step that ran once is always just over."""
    async for lane in _closed_after(Lane(now=lambda: 0.0)):
        yield lane


async def _closed_after(lane: Lane) -> AsyncIterator[Lane]:
    yield lane
    lane.backend.run_free()
    await asyncio.to_thread(lane.lane.close)
    await asyncio.gather(*lane.tasks, return_exceptions=True)


async def test_frames_of_one_session_run_in_the_order_given(lane: Lane) -> None:
    await lane.occupy()
    await lane.queue(*(("a", f"a{at}") for at in range(8)))
    await lane.finish()
    assert lane.backend.order == ["first", *(f"a{at}" for at in range(8))]


async def test_a_long_queue_of_one_session_delays_another_by_one_frame(lane: Lane) -> None:
    await lane.occupy()
    await lane.queue(*(("long", f"chunk{at}") for at in range(6)), ("short", "step"))
    await lane.finish()
    assert lane.backend.order[1:4] == ["chunk0", "step", "chunk1"]


async def test_sessions_go_round_whoever_comes_back_stands_at_the_end(lane: Lane) -> None:
    await lane.occupy()
    await lane.queue(("a", "a0"), ("a", "a1"), ("b", "b0"), ("c", "c0"), ("b", "b1"))
    lane.backend.let(2)  # "first" and a0
    await asyncio.to_thread(lambda: [lane.backend.started.acquire() for _ in range(2)])
    await lane.queue(("c", "c1"), ("d", "d0"))  # while b0 runs: c waits already, d is new
    await lane.finish()
    assert lane.backend.order[1:] == ["a0", "b0", "c0", "a1", "b1", "d0", "c1"]


@pytest.mark.usefixtures("one_thread")
async def test_the_lane_keeps_its_cpu_threads_when_others_take_theirs_before_its_first_product() -> None:
    async for lane in _closed_after(Lane(threads=3)):
        lane.backend.run_free()
        await lane.submit("a", "a0")  # the lane has taken its threads by now, and computed nothing
        await asyncio.to_thread(take_cpu_threads, 1)  # as a thread that loads a shard does
        assert await lane.submit("a", "a1", finish=lambda _: torch.get_num_threads()) == (3, ANY)


async def test_forward_and_finish_run_on_the_lanes_thread_and_are_timed(lane: Lane) -> None:
    lane.backend.run_free()
    thread, timing = await lane.submit("a", "a0", finish=lambda _: threading.current_thread().name)
    assert {thread} == lane.backend.threads == {"lane-under-test"}
    assert min(timing.queue_s, timing.forward_s, timing.finish_s) >= 0
    assert timing.pieces == 1


async def test_queued_counts_what_waits_and_what_runs(lane: Lane) -> None:
    """A lane whose one frame takes long is busy, though nothing waits behind it."""
    assert lane.lane.queued == 0
    await lane.occupy()
    assert lane.lane.queued == 1
    await lane.queue(("a", "a0"), ("a", "a1"), ("b", "b0"))
    assert lane.lane.queued == 4
    await lane.finish()
    assert lane.lane.queued == 0


async def test_frames_that_are_withdrawn_do_not_run_and_one_that_runs_goes_on(lane: Lane) -> None:
    running = await lane.occupy()
    await lane.queue(("a", "a0"), ("b", "b0"), ("a", "a1"))
    for turn in ("first", "a", "nobody's"):
        lane.lane.withdraw(turn)
    await asyncio.wait(lane.tasks[1:2], timeout=20)  # at once, while the other frame runs
    assert not running.done()
    await lane.finish()
    assert lane.backend.order == ["first", "b0"]
    assert [task.cancelled() for task in lane.tasks] == [False, True, False, True]


async def test_a_lane_with_nothing_to_do_keeps_nothing_of_what_it_did(lane: Lane) -> None:
    class Held:
        """What a frame's outcome refers to."""

        def __call__(self, _: ShardResult) -> None:
            return None

    lane.backend.run_free()
    held = Held()
    gone = weakref.ref(held)
    await lane.submit("a", "a0", finish=held)
    lane.tasks.clear()
    del held
    async with asyncio.timeout(20):
        while gone() is not None:
            gc.collect()
            await asyncio.sleep(0.01)


# -- batches ----------------------------------------------------------------------------------------------------------


async def test_without_a_batch_limit_frames_run_one_by_one(lane: Lane) -> None:
    await lane.occupy()
    await lane.queue(("a", "a0"), ("b", "b0"))
    await lane.finish()
    assert [len(batch) for batch in lane.backend.batches] == [1, 1, 1]


async def test_a_batch_gathers_frames_of_different_sessions_up_to_the_limit(lane: Lane) -> None:
    lane.backend.batch_limit = 3
    await lane.occupy()
    await lane.queue(("a", "a0"), ("a", "a1"), ("b", "b0"), ("c", "c0"), ("d", "d0"), ("b", "b1"))
    await lane.finish()
    assert lane.backend.batches[1:] == [["a0", "b0", "c0"], ["d0", "a1", "b1"]]


async def test_a_batch_holds_frames_of_one_backend_only(lane: Lane) -> None:
    lane.backend.batch_limit = 3
    other = ScriptedBackend(batch_limit=3)
    other.run_free()
    await lane.occupy()
    lane.submit("a", "a0")
    lane.submit("b", "other-b", backend=other)
    lane.submit("c", "c0")
    lane.submit("d", "other-d", backend=other)
    await asyncio.sleep(0)
    await lane.finish()
    assert lane.backend.batches[1:] == [["a0", "c0"]]
    assert other.batches == [["other-b", "other-d"]]


async def test_in_a_batch_each_caller_gets_its_own_result(lane: Lane) -> None:
    lane.backend.batch_limit = 3
    lane.backend.answer = lambda names: [KeyError(name) if name == "bad" else result() for name in names]
    await lane.occupy()
    await lane.queue(("a", "a0"), ("b", "bad"), ("c", "c0"))
    outcomes = await lane.finish()
    assert lane.backend.batches[1:] == [["a0", "bad", "c0"]]
    assert outcomes[1][0] == "a0"
    assert isinstance(outcomes[2], KeyError)
    assert outcomes[3][0] == "c0"


async def test_a_frame_that_must_run_alone_is_in_no_batch(lane: Lane) -> None:
    lane.backend.batch_limit = 3
    await lane.occupy()
    await lane.queue(("a", "a0"), ("b", "b0"), ("c", "c0"))
    lane.submit("d", "d0", exact=True)
    await lane.finish()
    assert lane.backend.batches[1:] == [["a0", "b0", "c0"], ["d0"]]
    assert lane.lane.batches == {1: 2, 3: 1}


# -- long frames in pieces --------------------------------------------------------------------------------------------


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


# -- errors -----------------------------------------------------------------------------------------------------------


async def test_an_error_reaches_its_caller_alone_and_the_lane_goes_on(lane: Lane) -> None:
    def fail(_: object) -> object:
        raise ValueError("in finish")

    def answer(names: list[str]) -> list[ShardResult | Exception]:
        if names == ["raises"]:
            raise KeyError("in forward")
        return [RuntimeError("as a result") if name == "returns" else result() for name in names]

    lane.backend.answer = answer
    lane.backend.run_free()
    with pytest.raises(KeyError, match="in forward"):
        await lane.submit("a", "raises")
    with pytest.raises(RuntimeError, match="as a result"):
        await lane.submit("a", "returns")
    with pytest.raises(ValueError, match="in finish"):
        await lane.submit("a", "good", finish=fail)
    assert (await lane.submit("a", "good"))[0] == "good"


@pytest.mark.parametrize("count", [0, 2])
async def test_a_backend_that_miscounts_its_results_does_not_end_the_lane(lane: Lane, count: int) -> None:
    lane.backend.answer = lambda _: [result() for _ in range(count)]
    lane.backend.run_free()
    with pytest.raises(RuntimeError, match=f"{count} results for 1 frames"):
        await lane.submit("a", "a0")
    lane.backend.answer = lambda _: [result()]
    assert (await lane.submit("a", "a1"))[0] == "a1"


async def test_a_caller_that_left_is_not_missed(lane: Lane) -> None:
    await lane.occupy()
    gone = lane.submit("a", "a0")
    await asyncio.sleep(0)
    gone.cancel()
    await lane.finish()
    assert gone.cancelled()
    assert (await lane.submit("b", "b0"))[0] == "b0"


# -- the end ----------------------------------------------------------------------------------------------------------


async def test_closing_ends_the_frame_that_runs_and_cancels_those_queued(
    lane: Lane, caplog: pytest.LogCaptureFixture
) -> None:
    first = await lane.occupy()
    await lane.queue(("a", "a0"), ("a", "a1"), ("b", "b0"))
    lane.tasks[-1].cancel()  # one of them nobody waits for any more
    closing = asyncio.create_task(asyncio.to_thread(lane.lane.close))
    await asyncio.sleep(0.02)
    assert not closing.done()
    lane.backend.run_free()
    await asyncio.wait_for(closing, 20)
    assert (await first)[0] == "first"
    await asyncio.gather(*lane.tasks, return_exceptions=True)
    assert [task.cancelled() for task in lane.tasks] == [False, True, True, True]
    assert lane.backend.order == ["first"]
    lane.tasks.clear()
    gc.collect()
    await asyncio.sleep(0)
    assert "never retrieved" not in caplog.text


async def test_a_closed_lane_takes_nothing_and_closes_again(lane: Lane) -> None:
    await asyncio.to_thread(lane.lane.close)
    with pytest.raises(RuntimeError, match="closed"):
        await lane.submit("a", "a0")
    await asyncio.to_thread(lane.lane.close)


def test_a_loop_that_is_gone_does_not_end_the_lane() -> None:
    lane, backend = ForwardLane(), ScriptedBackend()
    shard = cast(ShardBackend, backend)

    async def leave() -> None:
        task = asyncio.create_task(lane.run("a", shard, work("a0"), lambda _: None))
        await asyncio.to_thread(backend.started.acquire)
        task.cancel()

    asyncio.run(leave())
    backend.run_free()

    async def come() -> str:
        value, _ = await asyncio.wait_for(lane.run("a", shard, work("a1"), lambda _: "still here"), 20)
        return value

    assert asyncio.run(come()) == "still here"
    lane.close()
