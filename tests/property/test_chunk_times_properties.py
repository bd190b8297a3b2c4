"""The fit of chunk times: known costs come out of noisy samples, and nothing that is fed makes it absurd."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet_core.chunk_costs import ChunkCosts
from meshnet_core.frames import MAX_CHUNK
from meshnet_node.chunk_times import ChunkTimes

costs = st.builds(
    lambda position, fixed_positions, depth: ChunkCosts(position * fixed_positions, position, position * depth),
    st.floats(0.005, 1.0),
    st.floats(0.5, 50.0),
    st.floats(0, 1 / 500),
)
lengths = st.integers(17, MAX_CHUNK)
befores = st.integers(0, 8000)
seeds = st.integers(0, 2**32)
decodes = st.floats(0, 20.0) | st.none()
offs = st.floats(0.3, 3.0) | st.none()  # a chunk's fixed cost by half a decode step; None where none was measured


def fed(true: ChunkCosts, frames: list[tuple[int, int]], decode_ms: float | None, rng: random.Random) -> ChunkTimes:
    """A fit of what these frames, (positions, before), take on a shard of such costs, give or take 3 %."""
    times = ChunkTimes()
    for positions, before in frames:
        times.add(positions, before, true.chunk_ms(positions, before) * rng.uniform(0.97, 1.03), decode_ms)
    return times


@given(costs, seeds, offs)
def test_times_of_varied_chunks_are_predicted_closely(true: ChunkCosts, seed: int, off: float | None) -> None:
    rng = random.Random(seed)
    decode_ms = None if off is None else 2 * true.fixed_ms / off
    frames = [(rng.randint(17, MAX_CHUNK), rng.choice((0, rng.randint(0, 8000)))) for _ in range(80)]
    found = fed(true, frames, decode_ms, rng).costs(decode_ms)
    assert found is not None
    for positions in (32, 128, MAX_CHUNK):
        for before in (0, 1000, 6000):
            assert found.chunk_ms(positions, before) == pytest.approx(true.chunk_ms(positions, before), rel=0.1)


@given(costs, seeds, st.floats(0.3, 3.0))
def test_each_cost_is_found_where_it_counts(true: ChunkCosts, seed: int, off: float) -> None:
    """Each by what it makes of a chunk's time."""
    rng = random.Random(seed)
    frames = [(rng.choice((20, 64, 128, 256)), rng.choice((0, 1000, 4000))) for _ in range(80)]
    decode_ms = 2 * true.fixed_ms / off
    found = fed(true, frames, decode_ms, rng).costs(decode_ms)
    assert found is not None
    assert abs(found.fixed_ms - true.fixed_ms) < 0.1 * true.chunk_ms(64, 0)
    assert abs(found.position_ms - true.position_ms) * 256 < 0.1 * true.chunk_ms(256, 0)
    assert abs(found.depth_ms - true.depth_ms) * 256 * 4000 < 0.1 * true.chunk_ms(256, 4000)


@given(costs, lengths, seeds, decodes, st.integers(1, 60))
def test_chunks_of_one_length_predict_those(
    true: ChunkCosts, positions: int, seed: int, decode_ms: float | None, count: int
) -> None:
    found = fed(true, [(positions, 0)] * count, decode_ms, random.Random(seed)).costs(decode_ms)
    assert found is not None
    assert found.chunk_ms(positions, 0) == pytest.approx(true.chunk_ms(positions, 0), rel=0.06)


@given(costs, seeds)
def test_chunks_of_one_time_are_not_taken_for_a_fixed_cost(true: ChunkCosts, seed: int) -> None:
    """Chunks planned to take equally long say by themselves that the length does not matter."""
    rng = random.Random(seed)
    frames, before, ms = [], 0, true.chunk_ms(160, 0)
    while before < 3000:
        positions = min(range(1, 161), key=lambda n: abs(true.chunk_ms(n, before) - ms))
        frames.append((positions, before))
        before += positions
    decode_ms = 2 * true.fixed_ms
    found = fed(true, frames * 3, decode_ms, rng).costs(decode_ms)
    assert found is not None
    assert found.fixed_ms <= max(3 * true.fixed_ms, 0.5 * ms)


@given(st.lists(st.tuples(st.integers(1, MAX_CHUNK), befores, st.floats(0, 1e6), decodes), max_size=40), decodes)
def test_no_cost_is_ever_negative_or_odd(
    samples: list[tuple[int, int, float, float | None]], decode_ms: float | None
) -> None:
    times = ChunkTimes()
    for positions, before, ms, decode_then_ms in samples:
        times.add(positions, before, ms, decode_then_ms)
    found = times.costs(decode_ms)
    assert (found is None) == (not any(ms >= 1e-6 for _, _, ms, _ in samples))
    if found is not None:
        assert all(math.isfinite(cost) and cost >= 0 for cost in found.to_wire().values())
        assert ChunkCosts.from_wire(json.loads(json.dumps(found.to_wire()))) == found


@given(costs, seeds, decodes, st.floats(0.1, 10.0))
def test_what_is_rescaled_is_as_if_measured_so(
    true: ChunkCosts, seed: int, decode_ms: float | None, factor: float
) -> None:
    rng = random.Random(seed)
    times = fed(true, [(rng.randint(17, MAX_CHUNK), rng.randint(0, 4000)) for _ in range(40)], decode_ms, rng)
    was = times.costs(decode_ms)
    times.rescale(factor)
    now = times.costs(None if decode_ms is None else decode_ms * factor)
    assert was is not None
    assert now is not None
    for before in (0, 3000):
        assert now.chunk_ms(128, before) == pytest.approx(was.chunk_ms(128, before) * factor, rel=1e-6)
