"""Chunks of a prefill: the time is a flow shop's, the choice is the best of what may be chosen, frames keep to it."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from meshnet_core.frames import MAX_CHUNK, Phase
from meshnet_gateway.chunk_choice import CHUNK_STEP, NEAR, ROUND, choose_cut, equal_times, prefill_ms
from meshnet_gateway.epoch_frames import EpochFrames
from meshnet_gateway.prefill_cut import LEAST_IN_FLIGHT, MOST_IN_FLIGHT, PrefillCut
from meshnet_gateway.recovery import Replay
from meshnet_gateway.route_stages import Stage

times = st.integers(0, 4000).map(lambda quarters: quarters / 4)  # sums of them are exact
depths = st.integers(0, 64).map(lambda parts: parts / 1024)
one_stage = st.builds(Stage, times, times, times, depths)
stages = st.lists(one_stage, max_size=7)
lines = st.lists(one_stage, min_size=2, max_size=7)
positions = st.integers(1, 2000)
begins = st.integers(0, 4000)
chunks = st.integers(1, MAX_CHUNK)


def simulated_ms(line: list[Stage], lengths: tuple[int, ...], begin: int) -> float:
    """Each chunk through each stage, one after the other."""
    free = [0.0] * len(line)
    at = 0.0
    for length, before in zip(lengths, accumulate(lengths, initial=begin), strict=False):
        at = 0.0
        for index, stage in enumerate(line):
            at = max(at + stage.delay_ms, free[index]) + stage.busy_ms(length, before)
            free[index] = at
    return at


def equal_lengths(count: int, length: int) -> tuple[int, ...]:
    return tuple(min(length, count - start) for start in range(0, count, length))


@given(stages, st.lists(chunks, min_size=1, max_size=30).map(tuple), begins)
def test_the_time_is_that_of_chunks_that_go_through_one_by_one(
    line: list[Stage], lengths: tuple[int, ...], begin: int
) -> None:
    assert prefill_ms(line, lengths, begin) == simulated_ms(line, lengths, begin)


@given(one_stage, st.integers(1, 6), st.lists(chunks, min_size=1, max_size=30).map(tuple), begins)
def test_over_hops_alike_it_is_all_chunks_and_the_longest_again(
    hop: Stage, hops: int, lengths: tuple[int, ...], begin: int
) -> None:
    busy = [hop.busy_ms(n, before) for n, before in zip(lengths, accumulate(lengths, initial=begin), strict=False)]
    line = [Stage(hop.fixed_ms, hop.position_ms, 0.0, hop.depth_ms)] * hops
    assert prefill_ms(line, lengths, begin) == sum(busy) + (hops - 1) * max(busy)


@given(lines, positions, chunks, begins)
def test_no_cut_into_one_length_is_done_sooner(line: list[Stage], count: int, most: int, begin: int) -> None:
    cut = choose_cut(line, count, most, begin)
    assert 1 <= min(cut.lengths) <= cut.longest <= most
    assert LEAST_IN_FLIGHT <= cut.in_flight <= MOST_IN_FLIGHT
    chosen = [end - start for start, end in cut.chunks(begin, begin + count)]
    assert sum(chosen) == count
    chosen_ms = simulated_ms(line, tuple(chosen), begin)
    for other in (most, *range(CHUNK_STEP, most, CHUNK_STEP)):
        other_ms = simulated_ms(line, equal_lengths(count, other), begin)
        assert chosen_ms <= other_ms * (1 + NEAR + 1e-9)
        if len(equal_lengths(count, other)) < len(chosen):  # fewer would have been taken
            assert chosen_ms < other_ms


@given(one_stage, st.data(), chunks, begins)
def test_chunks_of_one_time_are_that_but_for_rounding(stage: Stage, data: st.DataObject, most: int, begin: int) -> None:
    count = data.draw(positions)
    fewest = -(-count // most)
    number = data.draw(st.integers(fewest, max(fewest, count // CHUNK_STEP)))
    lengths = equal_times(stage, count, number, most, begin)
    assert len(lengths) == number
    assert sum(lengths) == count
    assert min(lengths) >= 1
    assert max(lengths) <= most
    if most % ROUND == 0 and most >= CHUNK_STEP:
        assert all(length % ROUND == 0 for length in lengths[:-1])
    assert all(later <= earlier + ROUND for earlier, later in pairwise(lengths[:-1]))
    if max(lengths) < most and stage.position_ms:  # none was cut short
        befores = accumulate(lengths, initial=begin)
        work = [stage.busy_ms(n, before) - stage.fixed_ms for n, before in zip(lengths, befores, strict=False)]
        rounding = 2 * ROUND * (stage.position_ms + stage.depth_ms * (begin + count))
        assert max(work) - min(work) <= 2 * rounding


@given(one_stage, positions, chunks)
def test_one_hop_takes_chunks_as_long_as_may_be(hop: Stage, count: int, most: int) -> None:
    assert choose_cut([hop], count, most).lengths == (most,)
    assert choose_cut([], count, most).lengths == (most,)


@given(times, times, st.integers(CHUNK_STEP, 2000), st.integers(2, 6))
def test_hops_that_pay_nothing_for_a_chunk_take_short_ones(
    position_ms: float, delay_ms: float, count: int, hops: int
) -> None:
    line = [Stage(0.0, position_ms + 1, delay_ms)] * hops
    assert choose_cut(line, count).longest <= 2 * CHUNK_STEP or delay_ms > position_ms


@given(lines, positions, begins)
def test_dear_chunks_are_as_few_as_may_be(line: list[Stage], count: int, begin: int) -> None:
    dearer = [Stage(1e9, stage.position_ms, stage.delay_ms, stage.depth_ms) for stage in line]
    assert len(choose_cut(dearer, count, MAX_CHUNK, begin).lengths) == -(-count // MAX_CHUNK)


# -- frames -----------------------------------------------------------------------------------------------------------

frame_maker = EpochFrames("s-1", 1, 0, 1000, cache=True)
cuts = st.builds(PrefillCut, st.lists(st.integers(1, 40), min_size=1, max_size=8).map(tuple))
texts = st.integers(1, 200)


@given(cuts, texts, st.integers(0, 30), st.integers(0, 199), st.lists(st.integers(0, 250), max_size=4))
def test_frames_cover_every_position_once_and_end_where_they_must(
    cut: PrefillCut, prompt: int, answer: int, begin: int, forced: list[int]
) -> None:
    begin = min(begin, prompt - 1)
    tokens = tuple(range(prompt + answer))
    frames = list(frame_maker.prefill(tokens[:prompt], tokens[prompt:], cut, Replay.FAST, begin=begin, cuts=forced))
    at = begin
    for frame in frames:
        assert frame.position == at
        assert 1 <= frame.seq_len <= cut.longest
        at += frame.seq_len
    assert at == len(tokens)
    ends = {frame.position + frame.seq_len for frame in frames}
    assert {end for end in forced if begin < end < at} <= ends
    planned = set(accumulate(cut.lengths, initial=begin)) - {begin}
    assert {end for end in planned if end < at} <= ends  # where a frame had to end before, too
    assert [frame.phase for frame in frames] == [Phase.RESUME if begin else Phase.PREFILL] + [Phase.PREFILL] * (
        len(frames) - 1
    )
    assert [frame.sample for frame in frames] == [0] * (len(frames) - 1) + [1]


@given(lines, texts, st.integers(1, 30))
def test_an_exact_replay_has_the_boundaries_of_the_first_prefill(line: list[Stage], prompt: int, answer: int) -> None:
    cut = choose_cut(line, prompt, 64)
    tokens = tuple(range(prompt + answer))
    first = list(frame_maker.prefill(tokens[:prompt], (), cut, Replay.EXACT))
    again = list(frame_maker.prefill(tokens[:prompt], tokens[prompt:], cut, Replay.EXACT))
    in_chunks = [frame for frame in again if frame.phase is Phase.PREFILL]
    assert [(f.position, f.seq_len, bytes(f.body)) for f in in_chunks] == [
        (f.position, f.seq_len, bytes(f.body)) for f in first
    ]
    assert [(f.position, f.seq_len) for f in again[len(first) :]] == [(prompt + at, 1) for at in range(answer)]
