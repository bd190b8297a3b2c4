"""Decode steps that find their hop ready, which run without tasks: what ends them, and who hears of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from hop_line import (
    EPOCH,
    PATIENCE_S,
    PROMPT,
    SESSION,
    Gate,
    Line,
    decode_frame,
    settle,
    until,
)
from meshnet_core.clock import SystemClock
from meshnet_core.errors import CacheMissError, DeadlineError, HopFailedError, HopUnreachableError, MissReason
from meshnet_core.frames import Frame, FrameReply
from meshnet_node.cache_store import SessionKey
from meshnet_node.forward_lane import ForwardLane
from meshnet_node.shard_work import ShardBackend


async def at_first_step(line: Line, **changes: object) -> Frame:
    """The session of ``line``, prefilled; its first decode step."""
    await line.open(**changes)
    reply = await line.prefill(PROMPT)
    return decode_frame(reply.tokens[0].id, 12)


class Told:
    """What a step that was begun is told."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.outcomes: list[FrameReply | Exception] = []
        self._then = then

    def __call__(self, outcome: FrameReply | Exception) -> None:
        self.outcomes.append(outcome)
        self._then()

    async def one(self) -> FrameReply | Exception:
        """The only thing it is told."""
        await until(lambda: bool(self.outcomes))
        await settle()
        assert len(self.outcomes) == 1
        return self.outcomes[0]


def let_run(lane: ForwardLane) -> None:
    """Wait until a lane is through, and keep the loop from hearing of it meanwhile."""
    given_up = time.monotonic() + PATIENCE_S
    while lane.queued and time.monotonic() < given_up:
        time.sleep(0.001)
    time.sleep(0.05)


@pytest.mark.parametrize("hop", [0, 1])
async def test_whoever_is_told_may_end_the_session(line: Line, hop: int) -> None:
    step = await at_first_step(line)
    service = line.hops[hop]
    if hop:
        asked: list[Frame] = []
        line.wire.on_forward = lambda _url, frame: asked.append(frame)
        await line.send(step)
        step = replace(asked[0], position=13)
    told = Told(lambda: service.store.release(SESSION))
    assert service.begin(step, told)
    assert isinstance(await told.one(), FrameReply)
    assert len(service.store) == 0


async def test_two_that_ask_for_one_step_are_told_the_same_and_it_runs_once(line: Line, gate: Gate) -> None:
    step = await at_first_step(line)
    line.shards[0].before = gate
    told = Told()
    assert line.hops[0].begin(step, told)
    await gate.reached()
    assert not line.hops[0].begin(step, Told())
    twin = asyncio.create_task(line.send(step))
    await settle()
    gate.open()
    assert await told.one() == await twin
    assert await line.send(step) == await twin
    assert [shard.forwards for shard in line.shards] == [[(0, 12), (12, 1)]] * 2


async def test_a_caller_that_leaves_in_mid_step_leaves_it_to_the_next_who_asks(
    line: Line, expected: list[int], gate: Gate
) -> None:
    step = await at_first_step(line)
    line.shards[0].before = gate
    left = asyncio.create_task(line.send(step))
    await gate.reached()
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    gate.open()
    assert (await line.send(step)).tokens[0].id == expected[1]
    assert line.shards[0].forwards == [(0, 12), (12, 1)]


async def test_a_step_that_takes_too_long_is_blamed_on_its_hop_and_its_retry_joins_it(
    line: Line, expected: list[int], gate: Gate
) -> None:
    step = await at_first_step(line)
    line.shards[0].before = gate
    error = await line.refusal(replace(step, deadline_ms=60))
    assert (type(error), error.hop_index, error.boot) == (DeadlineError, 0, "b-0")
    again = asyncio.create_task(line.send(step))
    await settle()
    gate.open()
    assert (await again).tokens[0].id == expected[1]
    assert line.shards[0].forwards == [(0, 12), (12, 1)]


async def test_a_step_that_takes_far_too_long_takes_its_state_along(line: Line, gate: Gate) -> None:
    step = await at_first_step(line)
    line.shards[0].before = gate
    session = line.session()
    session.document = replace(session.document, step_deadline_ms=30)
    error = await line.refusal(replace(step, deadline_ms=30))
    assert (type(error), error.hop_index) == (DeadlineError, 0)
    store = line.hops[0].store
    await until(lambda: len(store) == 0)
    assert store.nbytes > 0  # a frame runs on it
    gate.open()
    await until(lambda: store.nbytes == 0)
    miss = await line.refusal(step)
    assert isinstance(miss, CacheMissError)
    assert (miss.reason, miss.hop_index) == (MissReason.FAILED, 0)


@pytest.mark.parametrize("hop", [0, 1])
async def test_a_release_in_mid_step_is_told_at_once_and_what_it_ran_on_held_until_it_stops(
    line: Line, gate: Gate, hop: int
) -> None:
    step = await at_first_step(line)
    line.shards[hop].before_layer = gate
    sent = asyncio.create_task(line.send(step))
    await gate.reached()
    store = line.hops[hop].store
    assert await line.hops[hop].release(SESSION) == 1
    with pytest.raises(CacheMissError) as caught:
        await asyncio.wait_for(sent, PATIENCE_S / 2)
    assert (caught.value.reason, caught.value.hop_index) == (MissReason.RELEASED, hop)
    assert store.nbytes > 0
    gate.open()
    await until(lambda: store.nbytes == 0)


async def test_a_release_of_a_step_that_waits_for_the_lane_withdraws_it(line: Line, gate: Gate) -> None:
    step = await at_first_step(line)
    await line.open(session="s-other")
    line.shards[0].before = gate
    other = asyncio.create_task(line.prefill(PROMPT, session="s-other"))
    await gate.reached()
    told = Told()
    assert line.hops[0].begin(step, told)
    await line.hops[0].release(SESSION)
    miss = await told.one()
    assert isinstance(miss, CacheMissError)
    assert (miss.reason, miss.hop_index) == (MissReason.RELEASED, 0)
    gate.open()
    await other
    assert line.shards[0].forwards == [(0, 12)] * 2


async def test_a_step_whose_session_ends_just_as_its_layers_do_is_not_passed_on(line: Line, gate: Gate) -> None:
    step = await at_first_step(line)
    line.shards[0].before = gate
    told = Told()
    assert line.hops[0].begin(step, told)
    await gate.reached()
    sent = len(line.wire.frames)
    gate.open()
    let_run(line.hops[0]._lane)
    line.hops[0].store.release(SESSION)
    miss = await told.one()
    assert isinstance(miss, CacheMissError)
    assert (miss.reason, miss.hop_index) == (MissReason.RELEASED, 0)
    await until(lambda: line.hops[0].store.nbytes == 0)
    assert len(line.wire.frames) == sent


async def test_a_step_that_was_withdrawn_takes_its_state_along(line: Line, gate: Gate) -> None:
    """It has its place in the session, which the state does not know of."""
    step = await at_first_step(line)
    await line.open(session="s-other")
    line.shards[0].before = gate
    other = asyncio.create_task(line.prefill(PROMPT, session="s-other"))
    await gate.reached()
    told = Told()
    assert line.hops[0].begin(step, told)
    line.hops[0]._lane.withdraw((SessionKey(SESSION, 0), EPOCH))
    miss = await told.one()
    assert isinstance(miss, CacheMissError)
    assert miss.reason is MissReason.FAILED
    assert line.hops[0].store.find(SessionKey(SESSION, 0)) is None
    gate.open()
    await other


async def test_a_newer_epoch_in_mid_step_ends_it(line: Line, expected: list[int], gate: Gate) -> None:
    step = await at_first_step(line)
    line.shards[0].before_layer = gate
    told = Told()
    assert line.hops[0].begin(step, told)
    await gate.reached()
    await line.open(epoch=EPOCH + 1)
    miss = await told.one()
    assert isinstance(miss, CacheMissError)
    assert miss.reason is MissReason.EPOCH_STALE
    gate.open()
    assert (await line.prefill(PROMPT, epoch=EPOCH + 1)).tokens[0].id == expected[0]


async def test_of_a_step_that_did_not_reach_the_next_hop_only_the_sending_is_done_again(
    line: Line, expected: list[int]
) -> None:
    def lose(_: Frame) -> None:
        line.wire.before = lambda _frame: None
        raise HopUnreachableError("lost", hop_index=1)

    step = await at_first_step(line)
    line.wire.before = lose
    error = await line.refusal(step)
    assert (type(error), error.hop_index) == (HopUnreachableError, 1)
    assert line.session().in_flight == 0
    assert (await line.send(step)).tokens[0].id == expected[1]
    assert line.shards[0].forwards == [(0, 12), (12, 1)]


async def test_a_release_of_a_step_that_waits_for_the_next_hop_ends_the_wait(line: Line) -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def hang(_: Frame) -> None:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    step = await at_first_step(line)
    line.wire.before = hang
    told = Told()
    assert line.hops[0].begin(step, told)
    async with asyncio.timeout(PATIENCE_S):
        await asked.wait()
        await line.hops[0].release(SESSION)
        await left.wait()
    miss = await told.one()
    assert isinstance(miss, CacheMissError)
    assert miss.reason is MissReason.RELEASED


async def test_a_sending_that_is_cancelled_is_told(line: Line) -> None:
    """As where the transport is closed before the node's sessions are."""

    async def closed(_: Frame) -> None:
        raise asyncio.CancelledError

    step = await at_first_step(line)
    line.wire.before = closed
    told = Told()
    assert line.hops[0].begin(step, told)
    assert isinstance(await told.one(), CacheMissError)
    assert line.session().in_flight == 0


async def test_closing_in_mid_step_is_told(backends: list[ShardBackend], gate: Gate) -> None:
    line = Line(backends, SystemClock())
    step = await at_first_step(line)
    line.shards[0].before = gate
    told = Told()
    assert line.hops[0].begin(step, told)
    await gate.reached()
    gate.open()
    await line.close()
    assert isinstance(await told.one(), CacheMissError | FrameReply)


async def test_a_step_on_a_closed_lane_is_told_and_takes_its_state_along(line: Line) -> None:
    step = await at_first_step(line)
    await asyncio.to_thread(line.hops[0]._lane.close)
    told = Told()
    assert line.hops[0].begin(step, told)
    error = await told.one()
    assert isinstance(error, HopFailedError)
    assert line.hops[0].store.find(SessionKey(SESSION, 0)) is None
    assert line.hops[0].store.nbytes == 0
