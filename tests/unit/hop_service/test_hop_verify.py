"""Verify frames at the hops: what is taken, in which order, and that nothing wrong is ever built upon."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hop_line import PROMPT, WHOLE, Gate, Line, decode_frame, packed, settle, tokens_frame
from meshnet_core.errors import BadFrameError, CacheMissError, HopUnreachableError, MissReason
from meshnet_core.frames import MAX_DRAFT, Frame, FrameReply, Phase
from tiny_models import VOCAB

END = len(PROMPT)


def verify_frame(tokens: Sequence[int], draft: Sequence[int], position: int, **changes: Any) -> Frame:
    """Tokens of the answer and drafts behind them, into the first hop."""
    frame = tokens_frame([*tokens, *draft], position, sample=len(draft) + 1, phase=Phase.VERIFY)
    return replace(frame, draft=tuple(draft), **changes)


def other(token: int) -> int:
    return (token + 1) % VOCAB


def ids_of(reply: FrameReply) -> list[int]:
    return [token.id for token in reply.tokens]


@pytest.fixture
async def begun(line: Line, expected: list[int]) -> Line:
    """Prefilled; the first token of the answer is known."""
    await line.open()
    reply = await line.send(WHOLE)
    assert ids_of(reply) == expected[:1]
    return line


async def test_the_tail_answers_up_to_the_first_draft_that_is_wrong(begun: Line, expected: list[int]) -> None:
    one, two, three, four, five, _ = expected
    reply = await begun.send(verify_frame([one], [two, three, other(four), five], END))
    assert ids_of(reply) == [two, three, four]
    assert [hop.accepted for hop in map(begun.session, (0, 1))] == [END + 3] * 2
    assert ids_of(await begun.send(decode_frame(four, END + 3))) == [five]


async def test_where_all_are_right_there_is_one_token_more(begun: Line, expected: list[int]) -> None:
    reply = await begun.send(verify_frame(expected[:1], expected[1:4], END))
    assert ids_of(reply) == expected[1:5]
    assert ids_of(await begun.send(verify_frame(expected[4:5], [], END + 4))) == expected[5:6]


async def test_a_frame_may_begin_again_where_the_one_before_it_began(begun: Line, expected: list[int]) -> None:
    """As a route asks for, of which another hop can only fall back to there."""
    one, two, three, four, five, _ = expected
    await begun.send(verify_frame([one], [two, other(three)], END))
    reply = await begun.send(verify_frame([one, two, three], [four, other(five)], END))
    assert ids_of(reply) == [four, five]
    assert begun.shards[1].forwards[-2:] == [(END, 3), (END, 5)]


async def test_the_identical_frame_is_answered_from_its_run_before_and_after_the_next_one(
    begun: Line, expected: list[int]
) -> None:
    first = verify_frame(expected[:1], [expected[1], other(expected[2])], END)
    reply = await begun.send(first)
    assert await begun.send(first) == reply
    second = verify_frame(expected[2:3], [expected[3], other(expected[4])], END + 2)
    after = await begun.send(second)
    assert await begun.send(first) == reply
    assert await begun.send(second) == after
    assert len(begun.shards[1].forwards) == 3
    assert ids_of(await begun.send(decode_frame(expected[4], END + 4))) == expected[5:6]


async def test_a_frame_with_other_drafts_is_another_frame(begun: Line, expected: list[int]) -> None:
    body = packed(expected[:3])
    first = verify_frame(expected[:1], expected[1:3], END)
    await begun.send(first)
    error = await begun.refusal(replace(first, sample=2, draft=(expected[2],)))
    assert isinstance(error, CacheMissError)
    assert first.body == body


@pytest.mark.parametrize("again", [0, 1])
async def test_old_frames_that_come_late_and_frames_that_skip_are_refused(
    begun: Line, expected: list[int], again: int, short_hold: None
) -> None:
    """Wherever the state may fall back to, only the one frame that goes on from what was accepted is taken."""
    one, two, three, four, _, _ = expected
    first = verify_frame([one], [two, other(three), 5], END)
    if again:
        await begun.send(verify_frame([one], [other(two)], END))
        first = verify_frame([one, two], [other(three), 5], END)
    await begun.send(first)  # accepted: one, two, and three is known
    ran = len(begun.shards[0].forwards)
    wrong = [
        decode_frame(three, END + 1),
        decode_frame(other(three), END + 3),
        decode_frame(5, END + 4),
        decode_frame(one, END),
        verify_frame([one], [two], END),
        verify_frame([one, two], [], END),
        verify_frame([one, two, three, four], [], END),
        verify_frame([two, three], [], END + 1),
        verify_frame([other(two)], [5], END + 1),
        verify_frame([5], [], END + 3),
    ]
    for frame in wrong:
        error = await begun.refusal(frame)
        assert isinstance(error, CacheMissError)
        assert error.reason is MissReason.POSITION_MISMATCH
    assert len(begun.shards[0].forwards) == ran
    assert ids_of(await begun.send(decode_frame(three, END + 2))) == [four]


async def test_until_the_reply_is_known_nothing_is_built_upon_a_verify_frame(
    begun: Line, expected: list[int], short_hold: None
) -> None:
    def lost(frame: Frame) -> None:
        if frame.phase is Phase.VERIFY and frame.hop_index == 1:
            raise HopUnreachableError("the reply was lost", hop_index=1)

    begun.wire.after = lost
    frame = verify_frame(expected[:1], expected[1:3], END)
    with pytest.raises(HopUnreachableError):
        await begun.send(frame)
    begun.wire.after = lambda _frame: None
    for position in range(END, END + 4):
        assert isinstance(await begun.refusal(decode_frame(5, position)), CacheMissError)
    assert ids_of(await begun.send(frame)) == expected[1:4]  # handed on again, and answered from the tail's own run
    assert [len(shard.forwards) for shard in begun.shards] == [2, 2]
    assert ids_of(await begun.send(decode_frame(expected[3], END + 3))) == expected[4:5]


async def test_a_frame_that_comes_while_drafts_are_verified_waits_for_what_becomes_of_them(
    begun: Line, expected: list[int], gate: Gate
) -> None:
    begun.shards[1].before = gate
    running = asyncio.create_task(begun.send(verify_frame(expected[:1], [expected[1], other(expected[2])], END)))
    await gate.reached()
    following = asyncio.create_task(begun.send(decode_frame(expected[2], END + 2)))
    await settle()
    assert not following.done()
    gate.open()
    assert ids_of(await running) == expected[1:3]
    assert ids_of(await following) == expected[3:4]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "samples that are not the drafts": ({"sample": 2}, "samples 3 times, not 2"),
    "no sample": ({"sample": 0}, "samples 3 times, not 0"),
    "drafts that are not in the body": ({"draft": (1, 1)}, "the last token ids of the body"),
    "a draft outside the vocabulary": ({"draft": (VOCAB, 1)}, "outside the vocabulary"),
    "too many drafts": ({"draft": (1,) * (MAX_DRAFT + 1), "sample": MAX_DRAFT + 2}, f"{MAX_DRAFT} of them drafted"),
    "a phase without drafts": ({"phase": Phase.DECODE}, "one position"),
}


@pytest.mark.parametrize("case", list(BAD))
async def test_a_verify_frame_that_is_wrong_is_refused_and_the_right_one_works(
    begun: Line, expected: list[int], case: str
) -> None:
    changes, message = BAD[case]
    good = verify_frame(expected[:1], expected[1:3], END)
    error = await begun.refusal(replace(good, **changes))
    assert isinstance(error, BadFrameError)
    assert message in error.message
    assert ids_of(await begun.send(good)) == expected[1:4]
