"""A frame that is wrong is refused with its reason, and the next good one works."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hop_line import EPOCH, GOOD, HIDDEN, PROMPT, Line, decode_frame, packed, tokens_frame
from in_process_mesh import random_prompt, reference_greedy, reference_model
from meshnet_core.errors import BadFrameError, CacheMissError, MissReason
from meshnet_core.frames import Frame, Phase
from meshnet_core.sampling import SampledToken
from tiny_models import VOCAB

# `GOOD`'s place at the second hop: right but for what it says.
ZEROS = replace(GOOD, hop_index=1, start_layer=2, body=bytes(4 * HIDDEN * 4))

BAD_FRAMES: dict[str, tuple[Frame, str]] = {
    "an empty body": (replace(GOOD, body=b""), "int32 token ids is 16 bytes, not 0"),
    "a byte too few": (replace(GOOD, body=GOOD.body[:-1]), "16 bytes, not 15"),
    "a byte too many": (replace(GOOD, body=bytes(GOOD.body) + b"\0"), "16 bytes, not 17"),
    "ids of 8 bytes": (replace(GOOD, body=struct.pack("<4q", *PROMPT[8:])), "16 bytes, not 32"),
    "fewer positions than ids": (replace(GOOD, seq_len=3, sample=0), "12 bytes, not 16"),
    "no positions": (replace(GOOD, seq_len=0, sample=0, body=b""), "at least 1"),
    "no time": (replace(GOOD, deadline_ms=0), "at least 1"),
    "an id beyond the vocabulary": (replace(GOOD, body=packed([1, 2, VOCAB, 3])), f"id {VOCAB} .* of {VOCAB}"),
    "a negative id": (replace(GOOD, body=packed([1, 2, -1, 3])), "token id -1"),
    "an id of garbage": (replace(GOOD, body=b"\xff\xff\xff\x7f" * 4), "token id 2147483647"),
    "a draft in a chunk": (replace(GOOD, draft=(5,)), "carries no draft"),
    "a verify frame in the prompt": (replace(GOOD, phase=Phase.VERIFY), "inside the 12 to prefill"),
    "the cache off": (replace(GOOD, cache=False, position=0), "opened with cache on"),
    "a last chunk that does not sample": (replace(GOOD, sample=0), "the last prefill chunk samples"),
    "two samples": (replace(GOOD, sample=2), "the last prefill chunk samples"),
    "a chunk in between that samples": (
        tokens_frame(PROMPT[8:10], 8, sample=1),
        "the others do not sample",
    ),
    "more than was to prefill": (
        tokens_frame([*PROMPT[8:], 5], 8, sample=1),
        "ends at position 13, beyond the 12",
    ),
    "more than was expected": (
        tokens_frame([5] * 200, 8, sample=0),
        "ends at position 208, the session was opened for 112",
    ),
    "a decode step inside the prompt": (decode_frame(PROMPT[8], 8), "inside the prompt of 12"),
    "several positions to decode": (replace(GOOD, phase=Phase.DECODE, position=12), "one position, not 4"),
    "a decode step that does not sample": (decode_frame(5, 12, sample=0), "samples after its position"),
    "a width of 16 bits": (replace(ZEROS, body=bytes(4 * HIDDEN * 2)), "float32 hidden states is 512 bytes, not 256"),
    "another hidden size": (replace(ZEROS, body=bytes(4 * (HIDDEN + 1) * 4)), "512 bytes, not 528"),
    "ids where hidden states belong": (replace(ZEROS, body=GOOD.body), "512 bytes, not 16"),
    "fewer positions than hidden states": (replace(ZEROS, seq_len=3, sample=0), "384 bytes, not 512"),
}

MISSES: dict[str, tuple[Frame, MissReason, int | None]] = {
    "a position ahead": (tokens_frame(PROMPT[9:], 9, sample=1), MissReason.POSITION_MISMATCH, 8),
    "a position behind": (tokens_frame(PROMPT[4:], 4, sample=1), MissReason.POSITION_MISMATCH, 8),
    "the first chunk with other ids": (tokens_frame([7] * 8, 0, sample=0), MissReason.POSITION_MISMATCH, 8),
    "a decode step too early": (decode_frame(5, 12), MissReason.POSITION_MISMATCH, 8),
    "another start layer": (replace(GOOD, start_layer=1), MissReason.RANGE_MISMATCH, 8),
    "another start layer behind": (replace(ZEROS, start_layer=3), MissReason.RANGE_MISMATCH, 8),
    "hidden states ahead": (
        replace(ZEROS, position=9, seq_len=3, body=bytes(3 * HIDDEN * 4)),
        MissReason.POSITION_MISMATCH,
        8,
    ),
    "an older epoch": (replace(GOOD, epoch=EPOCH - 1), MissReason.EPOCH_STALE, None),
    "a newer epoch": (replace(GOOD, epoch=EPOCH + 1), MissReason.UNKNOWN_SESSION, None),
    "another session": (replace(GOOD, session="s-other"), MissReason.UNKNOWN_SESSION, None),
}


async def go_on(line: Line, expected: list[int]) -> None:
    """The next good frame works, and all after it."""
    assert await line.decode(await line.send(GOOD)) == expected


@pytest.mark.parametrize("name", BAD_FRAMES)
async def test_a_bad_frame_is_refused_and_the_next_good_one_works(line: Line, expected: list[int], name: str) -> None:
    frame, message = BAD_FRAMES[name]
    await line.begin()
    error = await line.refusal(frame)
    assert isinstance(error, BadFrameError)
    assert re.search(message, error.message)
    assert (error.hop_index, error.boot, error.position) == (frame.hop_index, f"b-{frame.hop_index}", 8)
    await go_on(line, expected)
    assert [shard.forwards[:2] for shard in line.shards] == [[(0, 8), (8, 4)]] * 2


@pytest.mark.usefixtures("short_hold")
@pytest.mark.parametrize("name", MISSES)
async def test_a_frame_out_of_place_is_a_miss_with_its_reason_and_the_next_good_one_works(
    line: Line, expected: list[int], name: str
) -> None:
    frame, reason, position = MISSES[name]
    await line.begin()
    error = await line.refusal(frame)
    assert isinstance(error, CacheMissError)
    assert error.reason is reason
    assert (error.hop_index, error.boot, error.position) == (frame.hop_index, f"b-{frame.hop_index}", position)
    await go_on(line, expected)


async def test_a_frame_at_the_wrong_node_is_a_miss(line: Line, expected: list[int]) -> None:
    await line.begin()
    with pytest.raises(CacheMissError) as caught:
        await line.hops[0].forward(ZEROS)
    assert caught.value.reason is MissReason.UNKNOWN_SESSION
    assert caught.value.hop_index == 1
    await go_on(line, expected)


async def test_a_chunk_has_at_most_256_positions(line: Line, folder: Path) -> None:
    prompt = random_prompt(300, seed=4)
    await line.open(prompt=prompt)
    error = await line.refusal(tokens_frame(prompt[:257], 0, sample=0))
    assert isinstance(error, BadFrameError)
    assert "at most 256 positions, not 257" in error.message
    reply = await line.prefill(prompt)
    assert [token.id for token in reply.tokens] == reference_greedy(reference_model(folder), prompt, 1)
    assert line.shards[1].forwards == [(0, 256), (256, 44)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache": True}, "opened with cache off"),
        ({"position": 1}, "whole sequence"),
        ({"sample": 0}, "whole sequence"),
        ({"phase": Phase.DECODE}, "whole sequence"),
        ({"phase": Phase.VERIFY}, "whole sequence"),
    ],
)
async def test_on_the_stateless_path_a_frame_is_a_whole_sequence(
    line: Line, expected: list[int], changes: dict[str, Any], message: str
) -> None:
    whole = tokens_frame(PROMPT, 0, sample=1, cache=False)
    await line.open(cache=False)
    error = await line.refusal(replace(whole, **changes))
    assert isinstance(error, BadFrameError)
    assert message in error.message
    assert (await line.send(whole)).tokens == (SampledToken(expected[0]),)
