"""The forward lane: whose turn it is, who gets which error, and how it ends. The backends are scripted."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from typing import cast
from unittest.mock import ANY

import pytest
import torch

from meshnet_node.cpu_threads import take_cpu_threads
from meshnet_node.forward_lane import ForwardLane
from meshnet_node.shard_work import ShardBackend, ShardResult
from scripted_lane import Lane, ScriptedBackend, closed_after, result, work


@pytest.fixture
async def lane() -> AsyncIterator[Lane]:
    async for lane in closed_after(Lane()):
        yield lane


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
    async for lane in closed_after(Lane(threads=3)):
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
