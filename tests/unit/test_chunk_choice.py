"""Prefills cut by what nodes tell of themselves, over real shards in this process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from announcements import node, shard, snapshot
from in_process_mesh import MODEL, TinyMesh, random_prompt, reference_greedy, reference_model, tiny_mesh
from meshnet_core.chunk_costs import ChunkCosts
from meshnet_core.errors import MissReason, TrackerUnreachableError
from meshnet_core.estimate import Evidence
from meshnet_core.frames import MAX_CHUNK, Phase
from meshnet_core.hop_price import HOP_MS
from meshnet_core.layer_range import LayerRange
from meshnet_core.link_info import LinkInfo
from meshnet_core.membership import Snapshot
from meshnet_core.route import Hop, Route
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_gateway.chunk_choice import choose_cut, prefill_ms
from meshnet_gateway.generation import GenerationEngine, GenerationRequest
from meshnet_gateway.prefill_cut import MOST_IN_FLIGHT, PrefillCut
from meshnet_gateway.recovery import Replay
from meshnet_gateway.route_stages import Stage, stages_of
from meshnet_node.cache_store import SessionKey

PROMPT = random_prompt(150)
SMOLLM2 = [Stage(0, 0, 0.2), Stage(14, 1.3), Stage(0, 0, 0.2), Stage(14, 1.3)]  # 15 layers each on one thread, bfloat16


DEEP = [Stage(0, 0, 0.2), Stage(7, 0.6, 0, 3e-4), Stage(0, 0.001, 0.2), Stage(7, 0.6, 0, 3e-4)]


@pytest.mark.parametrize(
    ("line", "positions", "lengths"),
    [
        (SMOLLM2, 1000, (112,) * 8 + (104,)),
        (SMOLLM2, 20, (20,)),
        (SMOLLM2[:2], 1000, (MAX_CHUNK,)),  # one hop: nothing overlaps
        ([Stage(0, 0), Stage(900, 1), Stage(0, 0), Stage(4, 1)], 1000, (256, 256, 256, 232)),  # chunks cost one dearly
    ],
)
def test_what_is_measured_cuts_the_prefill(line: list[Stage], positions: int, lengths: tuple[int, ...]) -> None:
    assert choose_cut(line, positions).lengths == lengths


def test_later_chunks_are_shorter_where_they_attend_to_more() -> None:
    lengths = choose_cut(DEEP, 1000).lengths
    assert lengths[0] >= 1.3 * lengths[-2]
    times = [DEEP[1].busy_ms(length, sum(lengths[:index])) for index, length in enumerate(lengths)]
    assert max(times) < 1.1 * min(times[:-1])
    equal = min(prefill_ms(DEEP, [length] * (1000 // length) + [1000 % length]) for length in range(32, 257, 32))
    assert prefill_ms(DEEP, lengths) < 0.99 * equal


def test_a_held_prefix_is_before_the_chunks() -> None:
    assert choose_cut(DEEP, 500, begin=4000).lengths[0] < choose_cut(DEEP, 500).lengths[0]


def test_a_very_long_prompt_is_planned_too() -> None:
    cut = choose_cut(DEEP, 100_000)
    assert sum(cut.lengths) == 100_000
    assert cut.longest == MAX_CHUNK


def test_more_chunks_are_under_way_where_answers_come_late() -> None:
    near = choose_cut(SMOLLM2, 1000).in_flight
    far = choose_cut([Stage(0, 0, 200), *SMOLLM2[1:]], 1000).in_flight
    assert (near, far) == (2, MOST_IN_FLIGHT)


def test_stages_are_what_nodes_tell_of_their_layers_and_links() -> None:
    link = LinkInfo("b", 30.0, Evidence(), 64.0, Evidence())
    held = {"prefill_ms": 0.25, "hidden_size": 2**16}
    nodes = node("a", shard("0-19", **held), links=(link,)), node("b", shard("10-29", **held))
    hops = Hop("a", "http://a", LayerRange(0, 20)), Hop("b", "http://b", LayerRange(20, 30))
    route = Route("m", "f1", 30, hops)
    assert stages_of(route, snapshot(*nodes), {"a": 10.0}) == (
        Stage(0.0, 0.0, 5.0),
        Stage(HOP_MS + 20, 5.0),
        Stage(0.0, 16.0, 15.0),  # a quarter of a MiB for each position
        Stage(HOP_MS + 10, 2.5),
    )
    assert stages_of(route, snapshot(nodes[0]), {}) == ()
    packed = node("b", shard("10-29", dtype="bfloat16+int4", **held))
    assert stages_of(route, snapshot(nodes[0], packed), {}) == ()  # what a chunk costs there, no decode step tells
    costs = ChunkCosts(0.5, 0.25, 2**-10)
    told = node("b", shard("10-29", dtype="bfloat16+int4", chunk_costs=costs, **held))
    busy = stages_of(route, snapshot(nodes[0], told), {})[-1]  # but its own chunks do
    assert busy == Stage(HOP_MS + 5, 2.5, depth_ms=10 * 2**-10)
    assert busy.busy_ms(4, 2) == HOP_MS + 5 + 4 * 2.5 + 4 * 4 * 10 * 2**-10
    unmeasured = node("a", shard("0-19", decode_ms=None)), node("b", shard("10-29", decode_ms=None))
    assert all(stage.busy_ms(1) + stage.delay_ms > 0 for stage in stages_of(route, snapshot(*unmeasured), {}))


def measured_as(
    mesh: TinyMesh, decode_ms: float, prefill_ms: float, costs: ChunkCosts | None = None
) -> Callable[[], Awaitable[Snapshot]]:
    """The mesh's nodes, each with these milliseconds for each layer."""

    async def told() -> Snapshot:
        measured: dict[str, Any] = {"decode_ms": decode_ms, "prefill_ms": prefill_ms, "chunk_costs": costs}
        nodes = mesh.snapshot().nodes
        return Snapshot(
            tuple(replace(node, shards=tuple(replace(one, **measured) for one in node.shards)) for node in nodes)
        )

    return told


def cuts_of(mesh: TinyMesh) -> list[list[int]]:
    """Lengths of the prefill frames into the first hop, by epoch."""
    epochs: dict[int, list[int]] = {}
    for _, frame in mesh.transport.frames:
        if frame.hop_index == 0 and frame.phase is Phase.PREFILL:
            epochs.setdefault(frame.epoch, []).append(frame.seq_len)
    return [epochs[epoch] for epoch in sorted(epochs)]


async def answer(engine: GenerationEngine, replay: Replay, during: Callable[[str], None] | None = None) -> list[int]:
    """Eight greedy tokens; ``during(session)`` is called after the third."""
    generation = engine.start(GenerationRequest(MODEL, tuple(PROMPT), 8, SamplingParams(), recovery=replay))
    ids: list[int] = []
    try:
        async for event in generation:
            if isinstance(event, SampledToken):
                ids.append(event.id)
                if len(ids) == 3 and during is not None:
                    during(generation.session)
    finally:
        await generation.aclose()
    return ids


async def test_two_nodes_whose_chunks_cost_little_get_short_ones_and_the_same_answer(llama: Path) -> None:
    expected = reference_greedy(reference_model(llama), PROMPT, 8)
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:
        engine = mesh.engine()
        for decode_ms, cut in ((0.01, [32, 32, 32, 32, 22]), (1000.0, [150])):
            engine.measured = measured_as(mesh, decode_ms, 1.0)
            mesh.transport.frames.clear()
            assert await answer(engine, Replay.FAST) == expected
            assert cuts_of(mesh) == [cut]


async def test_one_node_alone_gets_long_chunks(llama: Path) -> None:
    async with tiny_mesh(llama, ["0-3"]) as mesh:
        engine = mesh.engine()
        engine.measured = measured_as(mesh, 0.01, 1.0)
        await answer(engine, Replay.FAST)
        assert cuts_of(mesh) == [[150]]


@pytest.mark.parametrize(("replay", "again"), [(Replay.EXACT, [32, 32, 32, 32, 22]), (Replay.FAST, [153])])
async def test_exact_recovery_keeps_its_cuts_though_the_nodes_became_slower(
    llama: Path, replay: Replay, again: list[int]
) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3"], dtype="bfloat16") as mesh:
        engine = mesh.engine()
        engine.measured = measured_as(mesh, 0.01, 1.0)
        undisturbed = await answer(engine, replay)
        mesh.transport.frames.clear()

        def lose(session: str) -> None:
            mesh.services[mesh.urls[1]].store.drop(SessionKey(session, 1), MissReason.EVICTED)
            engine.measured = measured_as(mesh, 1000.0, 1.0)

        ids = await answer(engine, replay, lose)
        assert cuts_of(mesh) == [[32, 32, 32, 32, 22], again]
        if replay is Replay.EXACT:
            assert ids == undisturbed


async def test_exact_recovery_keeps_chunks_of_different_lengths(llama: Path) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3"], dtype="bfloat16") as mesh:
        engine = mesh.engine()
        engine.measured = measured_as(mesh, 1.0, 1.0, ChunkCosts(0.1, 0.1, 0.01))
        undisturbed = await answer(engine, Replay.EXACT)
        mesh.transport.frames.clear()

        def lose(session: str) -> None:
            mesh.services[mesh.urls[1]].store.drop(SessionKey(session, 1), MissReason.EVICTED)
            engine.measured = measured_as(mesh, 1.0, 1.0, ChunkCosts(50.0, 0.1, 0.0))

        assert await answer(engine, Replay.EXACT, lose) == undisturbed
        first, again = cuts_of(mesh)
        assert first == again
        assert len(set(first[:-1])) > 1
        assert first == sorted(first, reverse=True)


async def test_nodes_measure_chunks_that_give_no_logits(llama: Path) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3"], measured=True) as mesh:
        for chunk, told in ((150, [True, False]), (50, [True, True])):
            await answer(mesh.engine(chunk=chunk), Replay.FAST)
            costs = [node.shards[0].chunk_costs for node in mesh.snapshot().nodes]
            assert [one is not None for one in costs] == told


def test_what_is_behind_a_plan_goes_in_chunks_as_long_as_its_longest() -> None:
    assert list(PrefillCut((3, 2)).chunks(10, 20)) == [(10, 13), (13, 15), (15, 18), (18, 20)]
    assert list(PrefillCut((3, 2)).chunks(10, 12)) == [(10, 12)]
    assert list(PrefillCut().chunks(10, 10)) == []
    assert list(PrefillCut((4, 4)).chunks(0, 9, cuts=(0, 3, 4, 30))) == [(0, 3), (3, 4), (4, 8), (8, 9)]


async def test_nobody_to_ask_is_no_reason_to_wait(llama: Path) -> None:
    async def silent() -> Snapshot:
        raise TrackerUnreachableError("no tracker answers")

    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:
        engine = mesh.engine()
        engine.measured = silent
        await answer(engine, Replay.FAST)
        assert cuts_of(mesh) == [[150]]
