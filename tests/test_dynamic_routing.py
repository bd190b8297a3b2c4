"""Routes that change, by what is measured of real traffic, and what they must never change: the answer.

Over real shards in this process, routes planned by the production function from what the nodes measure and tell; where
a test is about speed, what a shard measures is scripted, since the machine that runs it may be busy. And over real
processes.
"""

from __future__ import annotations

import asyncio
import random
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
from meshnet_core.clock import ManualClock
from meshnet_core.coverage import ModelSummary
from meshnet_core.demand import Demand
from meshnet_core.estimate import STRAYS
from meshnet_core.exploration import RouteDraws
from meshnet_core.membership import Snapshot
from meshnet_core.planning import plan_route
from meshnet_core.route import Route
from meshnet_core.sampling import SamplingParams
from meshnet_gateway.generation import Generation, GenerationEngine, GenerationRequest
from meshnet_node.forward_lane import ForwardLane
from meshnet_node.offered_shard import LoadedShard
from meshnet_node.shard_probes import MEASURED_STEPS, STALE_S, ShardProbes
from process_mesh import fetch_json, mesh_client, process_mesh

PROMPT = random_prompt(17)
COUNT = 24


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


def without_links(snapshot: Snapshot) -> Snapshot:
    """The snapshot, with no link measured."""
    return Snapshot(tuple(replace(node, links=()) for node in snapshot.nodes))


@pytest.mark.parametrize("ranges", [["0-2", "1-3"], ["0-1", "0-2", "2-3", "1-3"], ["0-0", "0-2", "2-3"]])
async def test_overlapping_ranges_with_effective_starts_give_the_unsharded_tokens(
    llama: Path, expected: list[int], ranges: list[str]
) -> None:
    async with tiny_mesh(llama, ranges, measured=True) as mesh:
        tokens, report = await mesh.answer(PROMPT, COUNT)
        assert [token.id for token in tokens] == expected
        assert report["epochs"] == 1


# -- speed ------------------------------------------------------------------------------------------------------------


class PacedShard(LoadedShard):
    """Measures what it is told to, give or take 2 %, whatever its frames take on this machine."""

    decode_pace_ms = 1.0
    rng = random.Random(2)

    def measure(
        self,
        layers: int,
        positions: int,
        decode: bool,
        forward_s: float,
        now: float = 0.0,
        before: int | None = None,
    ) -> None:
        forward_s = self.decode_pace_ms / 1000 * layers * positions * self.rng.gauss(1, 0.02)
        super().measure(layers, positions, decode, forward_s if decode else forward_s / 16, now, before)


def paced(mesh: TinyMesh) -> dict[str, PacedShard]:
    """The mesh's shards, by node, made to measure what they are told to."""
    shards = {}
    for url, service in mesh.services.items():
        (offer,) = service.shards
        held = offer.shard
        assert held is not None
        offer.shard = PacedShard(held.backend, held.model, held.fingerprint, held.max_positions)
        shards[url.removeprefix("http://")] = offer.shard
    return shards


class DrawnRoutes:
    """Routes over a mesh as a tracker gives them out, but for what it counts between heartbeats and for links: what
    these take on a busy machine is not scripted."""

    def __init__(self, mesh: TinyMesh) -> None:
        self._mesh = mesh
        self._draws = RouteDraws(seed=1)
        self.model = mesh.model

    async def route(self, model: ModelSummary, excluded: frozenset[str], demand: Demand | None = None) -> Route:
        draw = self._draws.next(model.name, explore=demand is None or demand.explore)
        return plan_route(without_links(self._mesh.snapshot()), model.name, excluded, demand=demand, draw=draw)


async def served_by(mesh: TinyMesh, engine: GenerationEngine, count: int) -> Counter[str]:
    """Which nodes were the last hops of the next ``count`` generations, one after the other."""
    taken = Counter[str]()
    mesh.engine = lambda **_: engine  # type: ignore[method-assign]
    for index in range(count):
        _, report = await mesh.answer(random_prompt(9, seed=index), 6)
        taken[report["route"][-1]["node"]] += 1  # type: ignore[index]
    return taken


async def test_a_slow_node_loses_all_but_the_exploring_share_and_gets_it_back_when_it_recovers(llama: Path) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3", "2-3"], measured=True) as mesh:
        shards = paced(mesh)
        engine = mesh.engine()
        engine.routes = DrawnRoutes(mesh)
        equal = await served_by(mesh, engine, 40)
        assert min(equal["node-1"], equal["node-2"]) >= 8

        shards["node-1"].decode_pace_ms = 10.0
        await served_by(mesh, engine, 20)
        slow = await served_by(mesh, engine, 40)
        assert slow == {"node-2": 38, "node-1": 2}  # one in twenty explores

        shards["node-1"].decode_pace_ms = 1.0
        assert (await served_by(mesh, engine, 20))["node-1"] >= 1
        recovered = await served_by(mesh, engine, 40)
        assert min(recovered["node-1"], recovered["node-2"]) >= 8


async def test_a_node_that_recovered_is_known_again_from_its_own_probes_alone(llama: Path) -> None:
    clock = ManualClock()
    async with tiny_mesh(llama, ["0-1", "2-3", "2-3"], measured=True) as mesh:
        shards = paced(mesh)
        for name, shard in shards.items():
            for _ in range(20):
                shard.decode_pace_ms = 10.0 if name == "node-1" else 1.0
                shard.measure(2, 1, True, 0.0, clock.now())
        assert [hop.node_id for hop in plan_route(mesh.snapshot(), MODEL).hops] == ["node-0", "node-2"]
        shards["node-1"].decode_pace_ms = 0.5
        lane = ForwardLane()
        probes = ShardProbes(mesh.services["http://node-1"].shards, lane, clock)
        for _ in range(STRAYS // MEASURED_STEPS):
            clock.advance(STALE_S)
            await probes.round()
        lane.close()
        assert [hop.node_id for hop in plan_route(mesh.snapshot(), MODEL).hops] == ["node-0", "node-1"]


async def test_four_hundred_seeded_draws_over_equal_nodes_share_them(llama: Path) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3", "2-3"], measured=True) as mesh:
        engine = mesh.engine()
        engine.routes = DrawnRoutes(mesh)
        paced(mesh)
        await served_by(mesh, engine, 40)  # real frames, so that speeds and links are measured
        snapshot = mesh.snapshot()
        assert {link.node_id for node in snapshot.nodes for link in node.links} == {"node-1", "node-2"}
        for node_id in ("node-1", "node-2"):
            snapshot = with_speed(snapshot, node_id, 1.0)
        draws = RouteDraws(seed=11)
        taken = Counter(
            plan_route(without_links(snapshot), MODEL, draw=draws.next(MODEL)).hops[-1].node_id for _ in range(400)
        )
        assert taken.keys() == {"node-1", "node-2"}
        assert 160 <= taken["node-1"] <= 240


async def test_a_link_measured_slow_sends_traffic_over_another_one(llama: Path) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3", "2-3"], measured=True) as mesh:
        paced(mesh)
        engine = mesh.engine()
        engine.routes = DrawnRoutes(mesh)
        links = mesh.services["http://node-0"].links
        for _ in range(20):
            links.took("node-1", 30.0, 0.0)
            links.took("node-2", 0.4, 0.0)
        snapshot = mesh.snapshot()
        told = {link.node_id: link.rtt_ms for link in snapshot.nodes[0].links}
        assert told == pytest.approx({"node-1": 30.0, "node-2": 0.4})
        assert [hop.node_id for hop in plan_route(snapshot, MODEL).hops] == ["node-0", "node-2"]


async def test_equal_nodes_share_what_runs_at_once(llama: Path) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3", "2-3"], measured=True) as mesh:
        mesh_told = _EqualSpeeds(mesh)
        engine = mesh.engine()
        engine.routes = mesh_told
        running: list[Generation] = []
        for index in range(6):  # each begins when those before it have begun, and none has ended
            prompt = tuple(random_prompt(9, seed=index))
            running.append(engine.start(GenerationRequest(MODEL, prompt, COUNT, SamplingParams())))
            await anext(aiter(running[-1]))
        served = Counter(generation.report()["route"][1]["node"] for generation in running)  # type: ignore[index]
        for generation in running:
            await generation.aclose()
        assert served == {"node-1": 3, "node-2": 3}


@pytest.mark.long
async def test_equal_nodes_both_serve_on_real_processes(llama: Path, tmp_path: Path) -> None:
    with process_mesh(str(llama), {"first": "0-1", "one": "2-3", "other": "2-3"}, tmp_path) as running:
        async with mesh_client(running.tracker_url) as client:
            taken = Counter[str]()
            for _ in range(5):
                answers = (client.answer(random_prompt(9, seed=index), 24) for index in range(8))
                taken.update(answer.report["route"][-1]["node"] for answer in await asyncio.gather(*answers))
            assert sum(taken.values()) == 40
            assert taken.keys() == {"one", "other"}  # how they share depends on how busy the machine is
            told = {name: await fetch_json(f"{child.url}/healthz") for name, child in running.nodes.items()}
            assert all(status["shards"][0]["decode_evidence"] is not None for status in told.values())
            assert {link["node_id"] for link in told["first"]["links"]} == {"one", "other"}


# -- who comes and goes -----------------------------------------------------------------------------------------------


async def test_a_join_is_used_by_the_next_answer_where_it_promises_to_be_faster(llama: Path) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3"], measured=True) as mesh:
        paced(mesh)["node-1"].decode_pace_ms = 5.0
        engine = mesh.engine()
        engine.routes = DrawnRoutes(mesh)
        assert await served_by(mesh, engine, 2) == {"node-1": 2}
        add_node(mesh, llama, "http://joined", "2-3")
        # Not measured yet, it is taken for what its device lets expect, and so is tried; only then it is known.
        assert await served_by(mesh, engine, 1) == {"joined": 1}
        (offer,) = mesh.services["http://joined"].shards
        assert offer.info().decode_ms is not None


async def test_a_join_is_used_and_a_drain_a_leave_and_a_death_are_survived_in_mid_answer(
    llama: Path, expected: list[int]
) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3"], measured=True) as mesh:
        made = 0

        def change(*_: object) -> None:
            nonlocal made
            made += 1
            if made == 4:
                add_node(mesh, llama, "http://joined", "1-3")
                mesh.services["http://node-1"].drain()
            if made == 8:  # and it has left
                mesh.down.add("http://node-1")
                mesh.kill("http://node-1")
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
        snapshot = without_links(self._mesh.snapshot())
        for node in snapshot.nodes:
            snapshot = with_speed(snapshot, node.node_id, 1.0)
        return plan_route(snapshot, model.name, excluded, demand=demand)
