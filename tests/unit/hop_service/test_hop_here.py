"""Decode steps that run in the event loop's own thread are the same steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from hop_line import EPOCH, PROMPT, SESSION, STEPS, Line, decode_frame
from meshnet_core.clock import SystemClock
from meshnet_core.errors import CacheMissError, HopFailedError, MissReason
from meshnet_node.cache_store import SessionKey
from meshnet_node.forward_lane import ForwardLane
from meshnet_node.shard_work import ShardBackend, ShardWork
from meshnet_node.steps_here import StepsHere


class Threads:
    """Notes for each frame whether it ran in the event loop's thread."""

    def __init__(self, line: Line) -> None:
        self.here: list[list[bool]] = [[], []]
        for shard, here in zip(line.shards, self.here, strict=True):
            shard.before = lambda _work, here=here: here.append(  # type: ignore[misc]
                threading.current_thread() is threading.main_thread()
            )


@pytest.fixture
async def line(backends: list[ShardBackend]) -> AsyncIterator[Line]:
    """Two nodes that run all steps in the loop's thread that may; for their lanes' clocks all comes at once."""
    line = Line(backends, SystemClock(), lane=lambda: ForwardLane(here=StepsHere(1e9), now=lambda: 0.0))
    yield line
    await line.close()
    assert [hop.store.nbytes for hop in line.hops] == [0, 0]


async def test_the_tokens_are_the_same(line: Line, expected: list[int]) -> None:
    threads = Threads(line)
    await line.open()
    assert await line.decode(await line.prefill(PROMPT)) == expected
    prefill_and_first = [False, False]
    assert threads.here == [[*prefill_and_first, *[True] * (STEPS - 2)]] * 2


async def test_what_replies_say_is_the_same(line: Line) -> None:
    await line.open()
    reply = await line.prefill(PROMPT)
    for _ in range(3):
        line.hops[1].draining = True
        reply = await line.send(decode_frame(reply.tokens[0].id, reply.position))
        assert [timing.hop_index for timing in reply.timings] == [0, 1]
        assert reply.draining == (1,)
    assert line.session(1).frames == {"prefill": 1, "decode": 3}


async def test_a_retry_is_answered_from_the_run(line: Line) -> None:
    await line.open()
    reply = await line.prefill(PROMPT)
    for _ in range(3):
        step = decode_frame(reply.tokens[0].id, reply.position)
        reply = await line.send(step)
        assert await line.send(step) == reply
    assert [len(shard.forwards) for shard in line.shards] == [4, 4]


async def test_steps_of_two_sessions_are_the_lanes(line: Line) -> None:
    await line.open()
    await line.open(session="s-other")
    reply = await line.prefill(PROMPT)
    other = await line.prefill(PROMPT, session="s-other")
    threads = Threads(line)
    for _ in range(3):
        reply = await line.send(decode_frame(reply.tokens[0].id, reply.position))
        other = await line.send(decode_frame(other.tokens[0].id, other.position, session="s-other"))
    assert threads.here == [[False] * 6] * 2
    for hop in line.hops:
        await hop.release("s-other")
    await line.send(decode_frame(reply.tokens[0].id, reply.position))
    assert threads.here == [[*[False] * 6, True]] * 2


async def test_a_session_that_sends_nothing_keeps_no_steps_of_another_from_it(line: Line) -> None:
    await line.open(session="s-other")
    await line.open()
    reply = await line.prefill(PROMPT)
    threads = Threads(line)
    for _ in range(3):
        reply = await line.send(decode_frame(reply.tokens[0].id, reply.position))
    assert threads.here == [[False, True, True]] * 2


@pytest.mark.parametrize("hop", [0, 1])
async def test_one_that_fails_takes_its_state_along(line: Line, expected: list[int], hop: int) -> None:
    def fail(_: ShardWork) -> None:
        assert threading.current_thread() is threading.main_thread()
        raise RuntimeError("on purpose")

    await line.open()
    reply = await line.prefill(PROMPT)
    reply = await line.send(decode_frame(reply.tokens[0].id, reply.position))
    line.shards[hop].before = fail
    error = await line.refusal(decode_frame(reply.tokens[0].id, reply.position))
    assert (type(error), error.hop_index, error.boot) == (HopFailedError, hop, f"b-{hop}")
    assert "on purpose" in error.message
    assert line.hops[hop].store.find(SessionKey(SESSION, hop)) is None
    line.shards[hop].before = lambda _work: None
    missed = await line.refusal(decode_frame(5, reply.position + hop))
    assert isinstance(missed, CacheMissError)
    assert (missed.reason, missed.hop_index) == (MissReason.FAILED, hop)
    await line.open(epoch=EPOCH + 1)
    again = await line.prefill(PROMPT, epoch=EPOCH + 1)
    assert again.tokens[0].id == expected[0]


async def test_who_else_asks_is_served_between_two(line: Line) -> None:
    await line.open()
    reply = await line.prefill(PROMPT)
    served = 0

    async def ask() -> None:
        nonlocal served
        while True:
            await line.hops[0].probe(None)
            served += 1
            await asyncio.sleep(0)

    asking = asyncio.create_task(ask())
    counts = []
    for _ in range(4):
        reply = await line.send(decode_frame(reply.tokens[0].id, reply.position))
        counts.append(served)
    asking.cancel()
    assert counts == sorted(set(counts))
