"""What fails takes its state along, and the hop to blame is named."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from hop_line import EPOCH, FIRST, GOOD, LIMITS, PROMPT, SESSION, URLS, WHOLE, Gate, Line, decode_frame, until
from meshnet_core.clock import ManualClock
from meshnet_core.errors import CacheMissError, DeadlineError, HopFailedError, MissReason
from meshnet_core.frames import Frame, FrameReply
from meshnet_core.sampling import SampledToken
from meshnet_node import frame_delivery, hop_service
from meshnet_node.cache_store import SessionKey
from meshnet_node.shard_work import ShardBackend, ShardWork


async def dropped_as_failed(line: Line, hop: int, frame: Frame) -> None:
    """The state at ``hop`` is gone, and the next frame is told so."""
    assert line.hops[hop].store.find(SessionKey(SESSION, hop)) is None
    error = await line.refusal(frame)
    assert isinstance(error, CacheMissError)
    assert (error.reason, error.hop_index) == (MissReason.FAILED, hop)


@pytest.mark.parametrize("hop", [0, 1])
async def test_a_forward_that_fails_takes_its_state_along(line: Line, expected: list[int], hop: int) -> None:
    def fail(_: ShardWork) -> None:
        raise RuntimeError("on purpose")

    await line.open()
    reply = await line.prefill(PROMPT)
    line.shards[hop].before = fail
    step = decode_frame(reply.tokens[0].id, 12)
    error = await line.refusal(step)
    assert (type(error), error.hop_index, error.boot) == (HopFailedError, hop, f"b-{hop}")
    assert "on purpose" in error.message
    line.shards[hop].before = lambda _work: None
    if hop == 1:  # the first hop still holds the frame's error, the next frame reaches the second
        step = decode_frame(5, 13)
    await dropped_as_failed(line, hop, step)
    await line.open(epoch=EPOCH + 1)
    again = await line.prefill(PROMPT, epoch=EPOCH + 1)
    assert again.tokens[0].id == expected[0]


async def test_a_forward_that_fails_between_layers_takes_its_state_along(line: Line) -> None:
    def fail() -> None:
        if line.shards[0].layers_run % 2:
            raise RuntimeError("in the second layer")

    line.shards[0].before_layer = fail
    await line.open()
    error = await line.refusal(WHOLE)
    assert isinstance(error, HopFailedError)
    line.shards[0].before_layer = lambda: None
    await dropped_as_failed(line, 0, WHOLE)


async def test_sampling_that_fails_takes_the_tails_state_along(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> SampledToken:
        raise ArithmeticError("on purpose")

    await line.open()
    monkeypatch.setattr(line.hops[1]._runs._own, "_sample", fail)
    error = await line.refusal(WHOLE)
    assert (type(error), error.hop_index) == (HopFailedError, 1)
    assert line.hops[1].store.find(SessionKey(SESSION, 1)) is None


async def test_a_failed_chunk_that_was_acknowledged_shows_in_the_next_frame(line: Line) -> None:
    def fail(_: ShardWork) -> None:
        raise RuntimeError("on purpose")

    line.shards[1].before = fail
    await line.open()
    assert (await line.send(FIRST)).position == 8
    error = await line.refusal(GOOD)
    assert isinstance(error, CacheMissError)
    assert (error.reason, error.hop_index) == (MissReason.FAILED, 1)


async def test_a_frame_that_takes_too_long_is_blamed_on_its_hop_and_its_retry_joins_it(
    line: Line, expected: list[int], gate: Gate
) -> None:
    line.shards[0].before = gate
    await line.open()
    error = await line.refusal(replace(WHOLE, deadline_ms=60))
    assert (type(error), error.hop_index, error.boot) == (DeadlineError, 0, "b-0")
    gate.open()
    assert await line.decode(await line.send(WHOLE)) == expected
    assert line.shards[0].forwards[:2] == [(0, 12), (12, 1)]


async def test_a_frame_that_takes_far_too_long_takes_its_state_along(line: Line, gate: Gate) -> None:
    line.shards[0].before = gate
    await line.open(step_deadline_ms=30)
    error = await line.refusal(replace(WHOLE, deadline_ms=30))
    assert (type(error), error.hop_index, error.boot) == (DeadlineError, 0, "b-0")
    await until(lambda: len(line.hops[0].store) == 0)
    gate.open()
    await dropped_as_failed(line, 0, WHOLE)


@pytest.fixture
def wide_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the time goes to the next hop, so that a busy machine does not blur whose was up first."""
    assert frame_delivery.DOWNSTREAM_MARGIN < 1
    monkeypatch.setattr(frame_delivery, "DOWNSTREAM_MARGIN", 0.5)


@pytest.mark.usefixtures("wide_margin")
async def test_a_frame_that_takes_too_long_behind_is_blamed_on_the_hop_behind(line: Line, gate: Gate) -> None:
    line.shards[1].before = gate
    await line.open()
    error = await line.refusal(replace(WHOLE, deadline_ms=3000))
    assert (type(error), error.hop_index) == (DeadlineError, 1)
    assert line.session().accepted == 12  # the first hop did its part and keeps its state
    gate.open()


@pytest.mark.usefixtures("wide_margin")
async def test_a_next_hop_that_never_answers_is_blamed(line: Line) -> None:
    asked: list[int] = []

    class Hung:
        async def forward(self, frame: Frame) -> FrameReply:
            asked.append(frame.deadline_ms)
            await asyncio.Event().wait()
            raise AssertionError

    await line.open()
    line.wire.endpoints[URLS[1]] = cast(Any, Hung())
    error = await line.refusal(replace(WHOLE, deadline_ms=3000))
    assert (type(error), error.hop_index) == (DeadlineError, 1)
    assert asked[0] <= 1500
    assert line.session().accepted == 12


async def test_no_time_left_after_the_own_layers_is_the_own_fault(backends: list[ShardBackend]) -> None:
    clock = ManualClock()
    line = Line(backends, clock)
    line.shards[0].before = lambda _work: clock.advance(20)
    await line.open()
    error = await line.refusal(WHOLE)
    assert (type(error), error.hop_index) == (DeadlineError, 0)
    assert line.wire.frames == []
    await line.close()


@pytest.mark.parametrize(("own_s", "blamed"), [(12, 0), (8, 1)])
async def test_the_hop_that_took_most_of_the_time_is_blamed_for_a_late_frame(
    backends: list[ShardBackend], own_s: float, blamed: int
) -> None:
    """Of 20 s, the next hop needs more than is left for it."""
    clock = ManualClock()
    line = Line(backends, clock)
    line.shards[0].before = lambda _work: clock.advance(own_s)

    async def late(frame: Frame) -> None:
        raise DeadlineError(f"not within {frame.deadline_ms} ms", hop_index=1)

    line.wire.before = late
    await line.open()
    error = await line.refusal(WHOLE)
    assert (type(error), error.hop_index) == (DeadlineError, blamed)
    await line.close()


async def test_an_evicted_session_is_told_so(line: Line) -> None:
    await line.begin()
    line.hops[1].store.drop(SessionKey(SESSION, 1), MissReason.EVICTED)
    error = await line.refusal(GOOD)
    assert isinstance(error, CacheMissError)
    assert (error.reason, error.hop_index, error.boot) == (MissReason.EVICTED, 1, "b-1")


@pytest.mark.parametrize("grower", ["s-old", "s-young"])
async def test_when_one_cannot_grow_the_younger_gets_a_miss_and_the_older_goes_on(
    line: Line, monkeypatch: pytest.MonkeyPatch, grower: str
) -> None:
    monkeypatch.setattr(hop_service, "GROWTH_QUANTUM", 3)
    newest = {}
    for session in ("s-old", "s-young"):
        await line.open(session=session)
        newest[session] = await line.prefill(PROMPT, session=session)

    async def step(session: str) -> None:
        reply = newest[session]
        frame = decode_frame(reply.tokens[0].id, reply.position, session=session)
        newest[session] = await line.send(frame)

    store = line.hops[1].store
    store.limits = replace(LIMITS, budget_bytes=store.nbytes)  # what both were given, and no more
    for _ in range(3):
        await step("s-young")
        await step("s-old")
    if grower == "s-old":
        await step("s-old")
    with pytest.raises(CacheMissError) as caught:
        await step("s-young")
    assert (caught.value.reason, caught.value.hop_index) == (MissReason.EVICTED, 1)
    for _ in range(5):
        await step("s-old")
    assert store.nbytes <= store.limits.budget_bytes


async def test_an_older_session_waits_for_the_younger_ones_frame_and_is_not_displaced_by_it(
    line: Line, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    """The younger one has to give way, and can only once no frame runs on it."""
    monkeypatch.setattr(hop_service, "GROWTH_QUANTUM", 2)
    newest = {}
    for session in ("s-old", "s-young"):
        await line.open(session=session)
        newest[session] = await line.prefill(PROMPT, session=session)

    def step(session: str) -> asyncio.Task[FrameReply]:
        reply = newest[session]
        return asyncio.create_task(line.send(decode_frame(reply.tokens[0].id, reply.position, session=session)))

    store = line.hops[1].store
    for session in ("s-young", "s-old", "s-old"):
        newest[session] = await step(session)
    store.limits = replace(LIMITS, budget_bytes=store.nbytes)  # what both were given: one step more for the younger one
    line.shards[1].before = gate
    young = step("s-young")
    await gate.reached()
    old = step("s-old")
    await until(lambda: line.hops[1].store.find(SessionKey("s-old", 1))[0].in_flight == 1)  # type: ignore[index]
    await asyncio.sleep(0.05)
    assert not old.done()
    assert store.find(SessionKey("s-old", 1)) is not None
    gate.open()
    newest["s-old"] = await old
    await asyncio.gather(young, return_exceptions=True)
    assert store.find(SessionKey("s-young", 1)) is None
    newest["s-old"] = await step("s-old")
