"""What hops hold on at a release, tell at an open and begin from; and what they refuse of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hop_line import PROMPT, SESSION, STEPS, WHOLE, Gate, Line, document, tokens_frame, until
from in_process_mesh import random_prompt
from meshnet_core.errors import BadFrameError, CacheMissError, MissReason
from meshnet_core.frames import FrameReply, Phase
from meshnet_core.open_document import OpenReply
from meshnet_core.prefix import EVERYONE, PrefixTerms, marks_of
from meshnet_node.held_prefixes import KEY_NBYTES
from meshnet_node.shard_work import ShardWork

MARKS = (4, 8, len(PROMPT) - 1, len(PROMPT))
NEXT = "s-next"


def terms(tokens: list[int], scope: str = EVERYONE) -> PrefixTerms:
    return PrefixTerms(scope, marks_of(tokens, MARKS))


async def answered(line: Line) -> None:
    """One session from its open to its release, held on."""
    await line.open(prefix=terms(PROMPT))
    tokens = await line.decode(await line.send(WHOLE))
    said = [*PROMPT, *tokens]
    for hop in line.hops:
        await hop.release(SESSION, None, marks_of(said, (len(said) - 1, len(said))))


async def open_next(line: Line, tokens: list[int], **changes: Any) -> list[OpenReply]:
    """Another session on both hops."""
    whole = document(session=NEXT, prompt=tokens, **{"prefix": terms(tokens), **changes})
    return [await hop.open(whole.for_hop(at)) for at, hop in enumerate(line.hops)]


async def resume(line: Line, tokens: list[int], position: int, **changes: Any) -> FrameReply:
    fields = {"session": NEXT, "phase": Phase.RESUME, "sample": 1} | changes
    return await line.send(tokens_frame(tokens[position:], position, **fields))


async def test_a_session_begins_on_what_another_one_left_and_answers_the_same(
    holding: Line, expected: list[int]
) -> None:
    await answered(holding)
    replies = await open_next(holding, PROMPT)
    assert [reply.held for reply in replies] == [(4, 8, len(PROMPT) - 1)] * 2  # the last position is to be run
    assert [reply.snapshots for reply in replies] == [False, False]
    assert await open_next(holding, PROMPT) == replies  # a retry of the open
    reply = await resume(holding, PROMPT, 8)
    assert reply.position == len(PROMPT)
    tokens = [reply.tokens[0].id]
    while len(tokens) < STEPS:
        frame = tokens_frame([tokens[-1]], reply.position, sample=1, phase=Phase.DECODE, session=NEXT)
        reply = await holding.send(frame)
        tokens.append(reply.tokens[0].id)
    assert tokens == expected
    assert [shard.forwards[-STEPS] for shard in holding.shards] == [(8, len(PROMPT) - 8)] * 2


async def test_the_identical_resume_frame_is_answered_from_its_run(holding: Line) -> None:
    await answered(holding)
    await open_next(holding, PROMPT)
    assert await resume(holding, PROMPT, 8) == await resume(holding, PROMPT, 8)
    assert holding.shards[0].forwards.count((8, len(PROMPT) - 8)) == 1


async def test_what_differs_is_shared_up_to_where_it_does(holding: Line) -> None:
    await answered(holding)
    other = [*PROMPT[:8], *random_prompt(4, seed=77)]
    assert [reply.held for reply in await open_next(holding, other)] == [(4, 8)] * 2


@pytest.mark.parametrize(
    "changes",
    [
        {"prefix": None},
        {"prefix": terms(PROMPT, "another")},
        {"wire_dtype": "bfloat16"},
        {"cache": False, "prefix": None},
    ],
)
async def test_nothing_is_told_to_who_may_not_use_it(holding: Line, changes: dict[str, Any]) -> None:
    await answered(holding)
    assert [reply.held for reply in await open_next(holding, PROMPT, **changes)] == [()] * 2


async def test_a_resume_frame_where_nothing_was_told_of_is_refused_and_the_session_goes_on(holding: Line) -> None:
    await answered(holding)
    await open_next(holding, PROMPT)
    with pytest.raises(BadFrameError, match="no prefix to begin from there"):
        await resume(holding, PROMPT, 9)
    assert (await resume(holding, PROMPT, 8)).position == len(PROMPT)
    with pytest.raises(CacheMissError) as caught:  # it is no longer at its beginning
        await resume(holding, PROMPT, 4)
    assert caught.value.reason is MissReason.POSITION_MISMATCH


async def test_what_has_gone_since_the_open_is_a_miss(holding: Line) -> None:
    await answered(holding)
    await open_next(holding, PROMPT)
    for hop in holding.hops:
        hop.store.prefixes.give_way(2**40)
    with pytest.raises(CacheMissError) as caught:
        await resume(holding, PROMPT, 8)
    assert caught.value.reason is MissReason.EVICTED


@pytest.mark.parametrize("fails", [True, False])
async def test_a_resume_frame_that_fails_has_saved_nothing(holding: Line, *, fails: bool) -> None:
    def fail(_: ShardWork) -> None:
        if fails:
            raise RuntimeError("on purpose")

    await answered(holding)
    await open_next(holding, PROMPT)
    holding.shards[0].before = fail
    await asyncio.gather(resume(holding, PROMPT, 8), return_exceptions=True)
    assert holding.hops[0].status()["prefill_positions_saved"] == (0 if fails else 8)


async def test_a_session_may_begin_at_0_whatever_it_was_told(holding: Line, expected: list[int]) -> None:
    await answered(holding)
    await open_next(holding, PROMPT)
    reply = await holding.send(tokens_frame(PROMPT, 0, sample=1, session=NEXT))
    assert reply.tokens[0].id == expected[0]


@pytest.mark.parametrize("keep", [(), marks_of(random_prompt(99), (99,))])
async def test_nothing_is_held_without_marks_that_fit_or_a_prefix_at_open(holding: Line, keep: Any) -> None:
    await holding.open()
    await holding.send(WHOLE)
    for hop in holding.hops:
        await hop.release(SESSION, None, keep)
        assert hop.store.nbytes == 0


async def test_a_session_whose_frame_still_runs_is_not_held_on(holding: Line, gate: Gate) -> None:
    await holding.open(prefix=terms(PROMPT))
    holding.shards[0].before = gate
    frame = asyncio.create_task(holding.send(WHOLE))
    await gate.reached()
    await holding.hops[0].release(SESSION, None, marks_of(PROMPT, (len(PROMPT),)))
    gate.open()
    with pytest.raises(CacheMissError):
        await frame
    await until(lambda: holding.hops[0].store.nbytes == 0)
    await holding.hops[1].release(SESSION)


async def test_status_tells_what_is_held_and_what_it_saved(holding: Line) -> None:
    await answered(holding)
    await open_next(holding, PROMPT)
    await resume(holding, PROMPT, 8)
    for hop in holding.hops:
        status = hop.status()
        per_position = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, their size, float32
        keys = KEY_NBYTES * sum(len(held.positions) for held in hop.store.prefixes)
        assert status["prefix_bytes"] == (len(PROMPT) + STEPS - 1) * per_position + keys
        assert (status["prefixes"], status["prefill_positions_saved"], status["prefixes_evicted"]) == (1, 8, 0)
