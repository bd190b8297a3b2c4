"""Chunks of a prefill: the formula is a flow shop's, and the choice is the best of what may be chosen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshnet_core.frames import MAX_CHUNK
from meshnet_gateway.chunk_choice import (
    CHUNK_STEP,
    LEAST_IN_FLIGHT,
    MOST_IN_FLIGHT,
    Stage,
    choose_cut,
    prefill_ms,
)

times = st.integers(0, 4000).map(lambda quarters: quarters / 4)  # sums of them are exact
stages = st.lists(st.builds(Stage, times, times, times), max_size=7)
lengths = st.integers(1, 2000)
chunks = st.integers(1, MAX_CHUNK)


def simulated_ms(line: list[Stage], positions: int, chunk: int) -> float:
    """Each chunk through each stage, one after the other."""
    free = [0.0] * len(line)
    at = 0.0
    for start in range(0, positions, chunk):
        at = 0.0
        for index, stage in enumerate(line):
            at = max(at + stage.delay_ms, free[index]) + stage.busy_ms(min(chunk, positions - start))
            free[index] = at
    return at


@given(stages, lengths, chunks)
def test_the_time_is_that_of_chunks_that_go_through_one_by_one(line: list[Stage], positions: int, chunk: int) -> None:
    assert prefill_ms(line, positions, chunk) == simulated_ms(line, positions, chunk)


@given(stages, lengths, chunks)
def test_no_other_length_is_done_sooner(line: list[Stage], positions: int, most: int) -> None:
    cut = choose_cut(line, positions, most)
    assert 1 <= cut.chunk <= most
    assert LEAST_IN_FLIGHT <= cut.in_flight <= MOST_IN_FLIGHT
    best = simulated_ms(line, positions, cut.chunk)
    assert all(best <= simulated_ms(line, positions, other) for other in (most, *range(CHUNK_STEP, most, CHUNK_STEP)))


@given(st.builds(Stage, times, times, times), lengths, chunks)
def test_one_hop_takes_chunks_as_long_as_may_be(hop: Stage, positions: int, most: int) -> None:
    assert choose_cut([hop], positions, most).chunk == most
    assert choose_cut([], positions, most).chunk == most


@given(times, times, lengths, st.integers(2, 6))
def test_hops_that_pay_nothing_for_a_chunk_take_the_shortest(
    position_ms: float, delay_ms: float, positions: int, hops: int
) -> None:
    line = [Stage(0.0, position_ms + 1, delay_ms)] * hops
    cut = choose_cut(line, positions)
    assert cut.chunk == (MAX_CHUNK if positions <= CHUNK_STEP else CHUNK_STEP)


@given(st.lists(st.builds(Stage, times, times, times), min_size=4, max_size=6), lengths, st.integers(1, 500))
def test_the_dearer_a_chunk_is_the_fewer_there_are(line: list[Stage], positions: int, more_ms: int) -> None:
    dearer = [Stage(stage.fixed_ms + more_ms, stage.position_ms, stage.delay_ms) for stage in line]
    before, after = choose_cut(line, positions).chunk, choose_cut(dearer, positions).chunk
    assert -(-positions // after) <= -(-positions // before)
