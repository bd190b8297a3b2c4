"""What a node makes of how long chunks of prefills took, and how it tells."""

from __future__ import annotations

import random
from typing import Any

import pytest

from announcements import shard
from meshnet_core.chunk_costs import ChunkCosts
from meshnet_core.errors import InvalidInputError
from meshnet_core.estimate import STRAYS
from meshnet_core.membership import ShardInfo
from meshnet_node.chunk_times import SURE, ChunkTimes
from meshnet_node.offered_shard import LoadedShard, OfferedShard

TRUE = ChunkCosts(0.4, 0.05, 2e-5)
PROMPT = [(128, 128 * index) for index in range(8)] + [(40, 1024)]


def fed(true: ChunkCosts, prompts: int, times: ChunkTimes | None = None, seed: int = 1) -> ChunkTimes:
    """A fit of so many prompts over a shard of such costs, give or take 5 %."""
    rng = random.Random(seed)
    times = times or ChunkTimes()
    for positions, before in PROMPT * prompts:
        times.add(positions, before, true.chunk_ms(positions, before) * rng.uniform(0.95, 1.05), 0.9)
    return times


def predicted(times: ChunkTimes, positions: int = 128, before: int = 0) -> float:
    found = times.costs(0.9)
    assert found is not None
    return found.chunk_ms(positions, before)


def test_a_chunk_takes_longer_the_more_is_before_it() -> None:
    costs = ChunkCosts(3.0, 0.5, 0.25)
    assert costs.chunk_ms(4, 0) == 3.0 + 4 * 0.5 + 4 * 2 * 0.25
    assert costs.chunk_ms(4, 10) == costs.chunk_ms(4, 0) + 4 * 10 * 0.25
    # As one chunk that costs nothing by itself, two attend to as much as one of both lengths.
    free = ChunkCosts(0.0, 0.5, 0.25)
    assert free.chunk_ms(6, 5) + free.chunk_ms(2, 11) == free.chunk_ms(8, 5)


def test_nothing_measured_tells_nothing_and_the_first_chunk_tells_of_its_like() -> None:
    times = ChunkTimes()
    assert times.costs(0.9) is None
    times.add(128, 0, 6.8, 0.9)
    assert predicted(times) == pytest.approx(6.8, rel=0.02)
    costs = times.costs(0.9)
    assert costs is not None
    assert costs.fixed_ms == pytest.approx(0.45, rel=0.1)  # half a decode step
    assert costs.depth_ms < 1e-5


def test_prompts_tell_what_chunks_cost_at_any_depth() -> None:
    times = fed(TRUE, 6)
    for positions, before in ((32, 0), (128, 0), (256, 0), (104, 900)):
        assert predicted(times, positions, before) == pytest.approx(TRUE.chunk_ms(positions, before), rel=0.08)


def test_one_chunk_that_took_far_longer_counts_for_little() -> None:
    times = fed(TRUE, 6)
    before = predicted(times)
    times.add(128, 0, 30 * before, 0.9)
    assert predicted(times) == pytest.approx(before, rel=0.05)
    times.add(128, 0, before / 30, 0.9)
    assert predicted(times) == pytest.approx(before, rel=0.15)


@pytest.mark.parametrize("factor", [3.0, 0.3])
def test_a_shard_that_became_another_is_followed(factor: float) -> None:
    times = fed(TRUE, 6)
    for _ in range(SURE):
        times.add(128, 0, factor * TRUE.chunk_ms(128, 0), 0.9)
    assert predicted(times) == pytest.approx(factor * TRUE.chunk_ms(128, 0), rel=0.05)


def test_a_slower_drift_is_followed_too() -> None:
    slower = ChunkCosts(1.5 * TRUE.fixed_ms, 1.5 * TRUE.position_ms, 1.5 * TRUE.depth_ms)
    assert predicted(fed(slower, 15, fed(TRUE, 6))) == pytest.approx(slower.chunk_ms(128, 0), rel=0.1)


# -- of a shard -------------------------------------------------------------------------------------------------------


class NoBackend:
    """Stands in for a shard's weights where nothing runs."""

    layers = shard("0-9").layers
    num_layers, hidden_size, dtype, weight_bytes = 30, 8, "float32", 0


def loaded() -> LoadedShard:
    backend: Any = NoBackend()
    return LoadedShard(backend, "m", "f1", 2048)


def test_a_shard_tells_what_its_chunks_cost_a_layer() -> None:
    held = loaded()
    assert held.info().chunk_costs is None
    for positions, before in PROMPT * 6:
        held.measure(5, positions, False, 5 * TRUE.chunk_ms(positions, before) / 1000, before=before)
    costs = held.info().chunk_costs
    assert costs is not None
    assert costs.chunk_ms(128, 512) == pytest.approx(TRUE.chunk_ms(128, 512), rel=0.03)
    offer = OfferedShard.held(held)
    assert offer.info().chunk_costs == costs
    offer.shard = None
    assert offer.info().chunk_costs == costs  # it outlives the shard's being dropped
    assert offer.loaded_with(held.backend).info().chunk_costs == costs


def test_steps_and_frames_whose_time_is_no_chunks_tell_nothing_of_chunks() -> None:
    held = loaded()
    held.measure(5, 128, False, 0.05)  # in pieces, or with logits
    held.measure(5, 16, False, 0.05, before=0)  # as short as a step
    held.measure(5, 1, True, 0.05, before=40)
    info = held.info()
    assert info.chunk_costs is None
    assert info.prefill_ms is not None


def test_chunks_are_expected_to_follow_decode_steps() -> None:
    held = loaded()
    for at in range(20):
        held.measure(1, 1, True, 0.001, float(at))
        held.measure(1, 128, False, 0.0065, float(at), before=0)
    was = held.info().chunk_costs
    for at in range(STRAYS):
        held.measure(1, 1, True, 0.003, 20.0 + at)
    now = held.info().chunk_costs
    assert was is not None
    assert now is not None
    assert now.chunk_ms(128, 0) == pytest.approx(3 * was.chunk_ms(128, 0), rel=0.1)


# -- on the wire ------------------------------------------------------------------------------------------------------


def test_costs_survive_the_wire_and_older_nodes_tell_none() -> None:
    document = shard("0-3", chunk_costs=TRUE).to_wire()
    assert document["chunk_costs"] == {"fixed_ms": 0.4, "position_ms": 0.05, "depth_ms": 2e-5}
    assert ShardInfo.from_wire(document).chunk_costs == TRUE
    document["chunk_costs"]["newer"] = 1
    assert ShardInfo.from_wire(document).chunk_costs == TRUE
    assert ShardInfo.from_wire(document | {"chunk_costs": None}).chunk_costs is None
    del document["chunk_costs"]
    assert ShardInfo.from_wire(document).chunk_costs is None


@pytest.mark.parametrize("odd", [-1.0, 1e10, float("inf"), float("nan"), "1", True, None, [1.0]])
@pytest.mark.parametrize("field", ["fixed_ms", "position_ms", "depth_ms"])
def test_odd_costs_are_refused(field: str, odd: object) -> None:
    document = shard("0-3", chunk_costs=TRUE).to_wire()
    document["chunk_costs"][field] = odd
    with pytest.raises(InvalidInputError, match=field):
        ShardInfo.from_wire(document)


@pytest.mark.parametrize("odd", [[], "cheap", 1.0, {}])
def test_what_is_no_costs_is_refused(odd: object) -> None:
    with pytest.raises(InvalidInputError, match="what chunks cost"):
        ShardInfo.from_wire(shard("0-3").to_wire() | {"chunk_costs": odd})
