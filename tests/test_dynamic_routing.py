"""Routes that change, and what they must never change: the answer.

Over real shards in this process, routes planned by the production function from what the nodes measure and tell. How
routes explore and recover by statistics of real traffic is still to come; here is what holds already.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from in_process_mesh import (
    MODEL,
    TinyMesh,
    add_node,
    random_prompt,
    reference_greedy,
    reference_model,
    tiny_mesh,
)
from meshnet_core.coverage import ModelSummary
from meshnet_core.demand import Demand
from meshnet_core.membership import Snapshot
from meshnet_core.planning import plan_route
from meshnet_core.route import Route
from tiny_models import save_tiny

PROMPT = random_prompt(17)
COUNT = 24


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[int]:
    return reference_greedy(reference_model(llama), PROMPT, COUNT)


def with_speed(snapshot: Snapshot, node_id: str, decode_ms: float) -> Snapshot:
    """The snapshot, with another measured speed of one node."""
    nodes = tuple(
        replace(node, shards=tuple(replace(shard, decode_ms=decode_ms) for shard in node.shards))
        if node.node_id == node_id
        else node
        for node in snapshot.nodes
    )
    return Snapshot(nodes)


@pytest.mark.parametrize("ranges", [["0-2", "1-3"], ["0-1", "0-2", "2-3", "1-3"], ["0-0", "0-2", "2-3"]])
async def test_overlapping_ranges_with_effective_starts_give_the_unsharded_tokens(
    llama: Path, expected: list[int], ranges: list[str]
) -> None:
    async with tiny_mesh(llama, ranges) as mesh:
        tokens, report = await mesh.answer(PROMPT, COUNT)
        assert [token.id for token in tokens] == expected
        assert report["epochs"] == 1


async def test_a_node_measured_slow_is_left_out_while_a_faster_cover_exists(llama: Path) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3", "2-3"]) as mesh:
        snapshot = mesh.snapshot()
        for slow, fast in (("node-1", "node-2"), ("node-2", "node-1")):
            told = with_speed(with_speed(snapshot, slow, 50.0), fast, 1.0)
            assert [hop.node_id for hop in plan_route(told, MODEL).hops] == ["node-0", fast]


async def test_equal_nodes_share_what_runs_at_once(llama: Path) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3", "2-3"]) as mesh:
        mesh_told = _EqualSpeeds(mesh)
        engine = mesh.engine()
        engine.routes = mesh_told
        mesh.engine = lambda **_: engine  # type: ignore[method-assign]
        reports = [report for _, report in await asyncio.gather(*(_later(mesh, index) for index in range(6)))]
        served = Counter(report["route"][1]["node"] for report in reports)  # type: ignore[index]
        assert set(served) == {"node-1", "node-2"}


async def test_a_join_is_used_and_a_drain_and_a_death_are_survived_in_mid_answer(
    llama: Path, expected: list[int]
) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:
        made = 0

        def change(*_: object) -> None:
            nonlocal made
            made += 1
            if made == 4:
                add_node(mesh, llama, "http://joined", "1-3")
                mesh.services["http://node-1"].drain()
            if made == 12:
                add_node(mesh, llama, "http://last", "2-3")
                mesh.kill("http://joined")

        tokens, report = await mesh.answer(PROMPT, COUNT, during=change)
        assert [token.id for token in tokens] == expected
        assert [hop["node"] for hop in report["route"]] == ["node-0", "last"]  # type: ignore[attr-defined]
        assert report["epochs"] == 3


class _EqualSpeeds:
    """Routes over a mesh whose nodes all measured the same, so that only their load tells them apart."""

    def __init__(self, mesh: TinyMesh) -> None:
        self._mesh = mesh
        self.model = mesh.model

    async def route(self, model: ModelSummary, excluded: frozenset[str], demand: Demand | None = None) -> Route:
        snapshot = self._mesh.snapshot()
        for node in snapshot.nodes:
            snapshot = with_speed(snapshot, node.node_id, 1.0)
        return plan_route(snapshot, model.name, excluded, demand=demand)


async def _later(mesh: TinyMesh, index: int) -> tuple[object, dict[str, object]]:
    """An answer that begins a little after those before it, so that their sessions are seen."""
    await asyncio.sleep(0.02 * index)
    return await mesh.answer(random_prompt(9, seed=index), 24)
