"""Frames sent again by a machine of the mesh that has seen them: each is answered from its own run, or refused. None
runs a second time, and the answer under way is what it would have been."""

from __future__ import annotations

from dataclasses import replace

from hop_line import EPOCH, GOOD, PROMPT, SESSION, STEPS, Line, decode_frame
from meshnet_core.errors import CacheMissError, HopError, MissReason
from meshnet_core.frames import Frame, FrameReply

KEPT_RUNS = 4


async def outcomes(line: Line, frames: list[Frame]) -> list[FrameReply | HopError]:
    found: list[FrameReply | HopError] = []
    for frame in frames:
        try:
            found.append(await line.send(frame))
        except HopError as error:
            found.append(error)
    return found


async def test_a_recorded_session_sent_again_changes_nothing(line: Line, expected: list[int]) -> None:
    await line.begin()
    sent = [GOOD]
    replies = [await line.send(GOOD)]
    while len(replies) < STEPS - 1:
        sent.append(decode_frame(replies[-1].tokens[0].id, len(PROMPT) + len(replies) - 1))
        replies.append(await line.send(sent[-1]))
    ran = [list(shard.forwards) for shard in line.shards]

    again = await outcomes(line, sent)
    assert again[-KEPT_RUNS:] == replies[-KEPT_RUNS:]
    assert len(again) > KEPT_RUNS
    for old in again[:-KEPT_RUNS]:
        assert isinstance(old, CacheMissError)
        assert old.reason is MissReason.POSITION_MISMATCH
    assert [shard.forwards for shard in line.shards] == ran
    tokens = [reply.tokens[0].id for reply in replies]
    assert tokens == expected[: len(tokens)]
    last = await line.send(decode_frame(tokens[-1], len(PROMPT) + len(tokens) - 1))
    assert last.tokens[0].id == expected[len(tokens)]


async def test_a_recorded_session_sent_again_after_its_end_is_refused(line: Line) -> None:
    await line.begin()
    await line.send(GOOD)
    for hop in line.hops:
        await hop.release(SESSION)
    ran = [list(shard.forwards) for shard in line.shards]
    for outcome in await outcomes(line, [GOOD, replace(GOOD, epoch=EPOCH + 1)]):
        assert isinstance(outcome, CacheMissError)
        assert outcome.reason is MissReason.RELEASED
    assert [shard.forwards for shard in line.shards] == ran
