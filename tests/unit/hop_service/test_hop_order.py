"""Frames of one session run in order of position, and the same frame again runs no second time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from hop_line import (
    FIRST,
    GOOD,
    HIDDEN,
    PROMPT,
    SESSION,
    STEPS,
    URLS,
    WHOLE,
    Gate,
    Line,
    decode_frame,
    packed,
    settle,
    tokens_frame,
    until,
)
from meshnet_core.clock import SystemClock
from meshnet_core.errors import CacheFullError, CacheMissError, DeadlineError, HopUnreachableError, MissReason
from meshnet_core.frames import Frame, FrameReply
from meshnet_node import frame_runs
from meshnet_node.cache_store import StoreLimits
from meshnet_node.shard_work import ShardBackend

# -- order -------------------------------------------------------------------------------------------------------------


async def test_chunks_that_overtake_each_other_run_in_order(line: Line, expected: list[int]) -> None:
    await line.open()
    chunks = [tokens_frame(PROMPT[at : at + 3], at, sample=int(at == 9)) for at in (9, 6, 3, 0)]
    replies = await asyncio.gather(*(line.send(frame) for frame in chunks))
    assert [reply.position for reply in replies] == [12, 9, 6, 3]
    assert [shard.forwards for shard in line.shards] == [[(0, 3), (3, 3), (6, 3), (9, 3)]] * 2
    assert await line.decode(replies[0]) == expected


async def test_an_early_frame_and_its_retry_both_get_the_answer_of_one_run(line: Line, expected: list[int]) -> None:
    await line.open()
    early = [asyncio.create_task(line.send(GOOD)) for _ in range(2)]
    await settle()
    await line.send(FIRST)
    replies = await asyncio.gather(*early)
    assert replies[0] == replies[1]
    assert [shard.forwards for shard in line.shards] == [[(0, 8), (8, 4)]] * 2
    assert await line.decode(replies[0]) == expected


async def test_of_two_frames_for_one_place_the_second_is_refused(line: Line, expected: list[int]) -> None:
    await line.open()
    other = replace(GOOD, body=packed([7, 7, 7, 7]))
    early = [asyncio.create_task(line.send(frame)) for frame in (GOOD, other)]
    await settle()
    await line.send(FIRST)
    reply, error = await asyncio.gather(*early, return_exceptions=True)
    assert isinstance(reply, FrameReply)
    assert isinstance(error, CacheMissError)
    assert error.reason is MissReason.POSITION_MISMATCH
    assert await line.decode(reply) == expected


async def test_an_early_frame_waits_no_longer_than_its_deadline(line: Line) -> None:
    await line.open()
    began = time.monotonic()
    error = await line.refusal(replace(GOOD, deadline_ms=50))
    assert isinstance(error, CacheMissError)
    assert error.reason is MissReason.POSITION_MISMATCH
    assert time.monotonic() - began < 5


async def test_an_early_frame_of_a_session_that_ends_is_told_so_at_once(line: Line) -> None:
    await line.open()
    early = asyncio.create_task(line.send(GOOD))
    await settle()
    await line.hops[0].release(SESSION)
    with pytest.raises(CacheMissError) as caught:
        await asyncio.wait_for(early, frame_runs.EARLY_HOLD_S / 2)
    assert caught.value.reason is MissReason.RELEASED


async def test_at_most_four_frames_of_a_session_are_in_flight_and_the_others_wait(
    line: Line, expected: list[int], gate: Gate
) -> None:
    line.shards[0].before = gate
    await line.open()
    chunks = [tokens_frame(PROMPT[at : at + 2], at, sample=int(at == 10)) for at in range(0, 12, 2)]
    sent = [asyncio.create_task(line.send(frame)) for frame in chunks]
    await gate.reached()
    await settle()
    assert line.session().in_flight == 4
    assert line.session().accepted == 8
    gate.open()
    replies = await asyncio.gather(*sent)
    assert line.shards[0].forwards == [(at, 2) for at in range(0, 12, 2)]
    assert await line.decode(replies[-1]) == expected


async def test_a_place_in_the_queue_is_free_as_soon_as_the_next_hop_has_answered(line: Line) -> None:
    """Own layers done, four deliveries under way: the fifth frame moves up when one of them ends, not at a timeout."""
    answered = asyncio.Event()
    asked: list[int] = []

    async def hold(frame: Frame) -> None:
        asked.append(frame.position)
        await answered.wait()

    line.wire.before = hold
    await line.open()
    chunks = [tokens_frame(PROMPT[at : at + 2], at, sample=int(at == 10)) for at in range(0, 12, 2)]
    sent = [asyncio.create_task(line.send(frame)) for frame in chunks]
    await until(lambda: len(asked) == 4)
    await settle()
    assert line.session().in_flight == 4
    began = time.monotonic()
    answered.set()
    await asyncio.gather(*sent)
    assert time.monotonic() - began < frame_runs.EARLY_HOLD_S / 2


@pytest.mark.usefixtures("short_hold")
async def test_who_waits_too_long_for_a_place_in_the_queue_is_told(line: Line, gate: Gate) -> None:
    line.shards[0].before = gate
    await line.open()
    chunks = [tokens_frame(PROMPT[at : at + 2], at, sample=0) for at in range(0, 8, 2)]
    sent = [asyncio.create_task(line.send(frame)) for frame in chunks]
    await gate.reached()
    error = await line.refusal(tokens_frame(PROMPT[8:10], 8, sample=0, deadline_ms=100))
    assert isinstance(error, DeadlineError)
    assert "4 frames of this session are still queued" in error.message
    gate.open()
    await asyncio.gather(*sent)


@pytest.mark.usefixtures("short_hold")
async def test_who_is_next_waits_for_a_place_as_long_as_its_deadline_allows(
    line: Line, gate: Gate, expected: list[int]
) -> None:
    """Frames of a slow node take longer than an early frame is held."""
    line.shards[0].before = gate
    await line.open()
    chunks = [tokens_frame(PROMPT[at : at + 2], at, sample=int(at == 10)) for at in range(0, 12, 2)]
    sent = [asyncio.create_task(line.send(frame)) for frame in chunks[:5]]
    await gate.reached()
    await asyncio.sleep(4 * frame_runs.EARLY_HOLD_S)
    gate.open()
    await asyncio.gather(*sent)
    assert await line.decode(await line.send(chunks[5])) == expected


# -- the same frame again ----------------------------------------------------------------------------------------------


async def test_an_identical_frame_gets_the_identical_reply_and_runs_once(line: Line, expected: list[int]) -> None:
    await line.begin()
    await line.send(FIRST)
    first = await line.send(GOOD)
    assert await line.send(GOOD) == first
    assert await line.send(replace(GOOD, body=bytearray(GOOD.body), deadline_ms=5000)) == first
    assert [shard.forwards for shard in line.shards] == [[(0, 8), (8, 4)]] * 2
    tokens = await line.decode(first, 3)
    step = decode_frame(tokens[1], 13)
    assert (await line.send(step)).tokens[0].id == tokens[2]
    assert len(line.shards[1].forwards) == 4
    assert await line.decode(first) == expected


async def test_an_identical_frame_joins_the_one_that_runs(line: Line, expected: list[int], gate: Gate) -> None:
    line.shards[1].before = gate
    await line.open()
    sent = [asyncio.create_task(line.prefill(PROMPT)) for _ in range(3)]
    await gate.reached()
    gate.open()
    first, second, third = await asyncio.gather(*sent)
    assert first == second == third
    assert [shard.forwards for shard in line.shards] == [[(0, 12)]] * 2
    assert await line.decode(first) == expected


async def test_a_reply_lost_on_the_way_back_costs_no_forward(line: Line, expected: list[int]) -> None:
    lost: list[int] = []

    def lose(frame: Frame) -> None:
        if frame.position % 3 == 0 and frame.position not in lost:
            lost.append(frame.position)
            raise HopUnreachableError("lost on purpose", hop_index=1)

    line.wire.after = lose
    await line.open()

    async def until_answered(frame: Frame) -> FrameReply:
        while True:
            try:
                return await line.send(frame)
            except HopUnreachableError:
                pass

    reply = await until_answered(WHOLE)
    tokens = [reply.tokens[0].id]
    while len(tokens) < STEPS:
        reply = await until_answered(decode_frame(tokens[-1], reply.position))
        tokens.append(reply.tokens[0].id)
    assert tokens == expected
    assert lost == [0, 12, 15]
    assert [shard.forwards for shard in line.shards] == [[(0, 12), *((at, 1) for at in range(12, 17))]] * 2


async def test_hidden_states_are_kept_and_counted_until_the_next_hop_has_answered(line: Line) -> None:
    line.wire.endpoints.pop(URLS[1])
    await line.open()
    error = await line.refusal(WHOLE)
    assert (type(error), error.hop_index) == (HopUnreachableError, 1)
    session = line.session()
    assert session.nbytes == session.state_bytes + len(PROMPT) * HIDDEN * 4
    assert line.hops[0].store.nbytes >= session.nbytes
    line.wire.endpoints[URLS[1]] = line.hops[1]
    await line.send(WHOLE)
    assert session.nbytes == session.state_bytes
    assert line.shards[0].forwards == [(0, 12)]


async def test_two_retries_of_a_broken_delivery_deliver_once(line: Line, expected: list[int]) -> None:
    line.wire.endpoints.pop(URLS[1])
    await line.open()
    await line.refusal(WHOLE)
    line.wire.endpoints[URLS[1]] = line.hops[1]
    first, second = await asyncio.gather(line.send(WHOLE), line.send(WHOLE))
    assert first == second
    assert len([frame for _, frame in line.wire.frames if frame.hop_index == 1]) == 2
    assert await line.decode(first) == expected


async def test_a_caller_that_leaves_does_not_take_the_run_along(line: Line, expected: list[int], gate: Gate) -> None:
    line.shards[0].before = gate
    await line.open()
    gone = asyncio.create_task(line.send(WHOLE))
    await gate.reached()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    gate.open()
    assert await line.decode(await line.send(WHOLE)) == expected
    assert [shard.forwards.count((0, 12)) for shard in line.shards] == [1, 1]


async def test_frames_long_answered_are_forgotten(line: Line) -> None:
    await line.open()
    await line.decode(await line.prefill(PROMPT))
    error = await line.refusal(WHOLE)
    assert isinstance(error, CacheMissError)
    assert error.reason is MissReason.POSITION_MISMATCH
    assert error.position == len(PROMPT) + STEPS - 1


# -- the stateless path ------------------------------------------------------------------------------------------------


async def test_a_node_without_any_room_still_serves_the_stateless_path(
    backends: list[ShardBackend], expected: list[int]
) -> None:
    line = Line(backends, SystemClock(), StoreLimits(budget_bytes=0))
    with pytest.raises(CacheFullError):
        await line.open()
    await line.open(cache=False)
    tokens: list[int] = []
    while len(tokens) < STEPS:
        reply = await line.send(tokens_frame([*PROMPT, *tokens], 0, sample=1, cache=False))
        tokens.append(reply.tokens[0].id)
    assert tokens == expected
    await line.close()
    assert [hop.store.nbytes for hop in line.hops] == [0, 0]


async def test_frames_of_whole_sequences_are_counted_and_bounded(backends: list[ShardBackend]) -> None:
    """They are the last resort: one session always fits, but those beside it take turns with it."""
    whole = (len(PROMPT) + 100) * (4 + HIDDEN * 4)
    limits = StoreLimits(budget_bytes=0, stateless_bytes=whole * 3 // 2)
    line = Line(backends, SystemClock(), limits)
    await line.open(cache=False)
    assert line.hops[0].status()["reserved_bytes"] == whole
    with pytest.raises(CacheFullError, match="session without state") as caught:
        await line.open(cache=False, session="s-other")
    assert not caught.value.never
    for hop in line.hops:
        await hop.release(SESSION)
    line.hops[0].store.limits = replace(limits, stateless_bytes=10)
    await line.open(cache=False, session="s-other")
    await line.close()


async def test_a_stateless_frame_whose_delivery_broke_runs_again_and_is_sampled_once(
    line: Line, expected: list[int]
) -> None:
    def lose_once(frame: Frame) -> None:
        line.wire.after = lambda _frame: None
        raise HopUnreachableError("lost on purpose", hop_index=frame.hop_index)

    line.wire.after = lose_once
    await line.open(cache=False)
    frame = replace(WHOLE, cache=False)
    assert isinstance(await line.refusal(frame), HopUnreachableError)
    assert line.session().nbytes == 0  # what would be delivered again is not kept
    assert (await line.send(frame)).tokens[0].id == expected[0]
    assert [len(shard.forwards) for shard in line.shards] == [2, 1]
