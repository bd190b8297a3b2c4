"""Room and drains on real processes: two nodes with room for eight sessions, and nodes that are told to stop."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from in_process_mesh import random_prompt, reference_greedy, reference_model
from meshnet_cli.children import Child
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_gateway.generation import Generation, GenerationRequest
from meshnet_node.growing_cache import rows_for
from process_mesh import MeshClient, fetch_json, mesh_client, process_mesh
from tiny_models import save_tiny

pytestmark = pytest.mark.long

PROMPT_LENGTH, COUNT = 9, 8
DRAIN_S = 30.0  # a node's own
# Keys and values of two layers, the token ids that come in, and hidden states on their way to hop 1.
PER_POSITION = 2 * 2 * 2 * 8 * 4 + 4 + 32 * 4
EXPIRED = 'meshnet_node_sessions_dropped_total{reason="expired"}'
ROOM_FOR_8 = str(8 * rows_for(PROMPT_LENGTH + COUNT) * PER_POSITION)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("model") / "tiny-llama")


async def metrics_of(url: str) -> dict[str, float]:
    """What a node counts, by metric and labels."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
        text = await response.text()
    return {name: float(value) for name, value in re.findall(r"^(meshnet_\S+) (\S+)$", text, re.MULTILINE)}


async def test_200_sessions_with_room_for_8_leave_memory_as_it_was(model: Path, tmp_path: Path) -> None:
    prompts = [random_prompt(PROMPT_LENGTH, seed=index) for index in range(10)]
    reference = reference_model(model)
    right = [reference_greedy(reference, prompt, COUNT) for prompt in prompts]
    bounds = ("--cache-bytes", ROOM_FOR_8)
    nodes = {"head": "0-1", "tail": "2-3"}
    with process_mesh(str(model), nodes, tmp_path, more={"head": bounds, "tail": bounds}) as mesh:
        async with mesh_client(mesh.tracker_url) as client:

            async def sessions(count: int) -> list[list[int]]:
                made = await asyncio.gather(*(client.answer(prompts[n % 10], COUNT) for n in range(count)))
                return [answer.ids for answer in made]

            def resident() -> dict[str, int]:
                return {name: psutil.Process(child.process.pid).memory_info().rss for name, child in mesh.nodes.items()}

            assert await sessions(20) == right * 2
            early = resident()
            assert await sessions(200) == right * 20
            late = resident()
            assert client.engine.room.waits > 100
            assert client.engine.room.turned_away == 0
            for name in nodes:
                assert late[name] < 1.1 * early[name]
            statuses = await client.node_status()
            assert {name: status["sessions"] for name, status in statuses.items()} == {"head": 0, "tail": 0}
            assert {name: status["state_bytes"] for name, status in statuses.items()} == {"head": 0, "tail": 0}
            told = await metrics_of(str(mesh.nodes["head"].url))
            assert told['meshnet_node_calls_total{call="/hop/open",result="cache_full"}'] > 100
            assert told["meshnet_node_budget_bytes"] == float(ROOM_FOR_8)
            assert told['meshnet_node_sessions_dropped_total{reason="released"}'] >= 220


async def test_who_gave_way_to_growth_and_what_was_missed_for_it_are_counted(model: Path, tmp_path: Path) -> None:
    """Two fit as they open, with a quantum to grow; they outgrow the node together."""
    prompts, count = [random_prompt(PROMPT_LENGTH, seed=index) for index in range(2)], 300
    bounds = ("--cache-bytes", str(570 * PER_POSITION))
    with process_mesh(str(model), {"head": "0-1", "tail": "2-3"}, tmp_path, more={"head": bounds}) as mesh:
        async with mesh_client(mesh.tracker_url) as client:
            alone = [await client.answer(prompt, count) for prompt in prompts]
            assert [answer.report["epochs"] for answer in alone] == [1, 1]
            together = await asyncio.gather(*(client.answer(prompt, count) for prompt in prompts))
            assert [answer.ids for answer in together] == [answer.ids for answer in alone]
        told = await metrics_of(str(mesh.nodes["head"].url))
        preempted = told['meshnet_node_sessions_dropped_total{reason="preempted"}']
        assert preempted >= 1
        assert told['meshnet_node_misses_total{reason="evicted"}'] >= preempted
        assert told["meshnet_node_sessions"] == told["meshnet_node_reserved_bytes"] == 0


async def test_what_a_gateway_that_died_left_behind_goes_when_its_time_is_up(model: Path, tmp_path: Path) -> None:
    nodes = {"head": "0-1", "tail": "2-3"}
    short = dict.fromkeys(nodes, ("--session-ttl", "10"))
    with process_mesh(str(model), nodes, tmp_path, more=short) as mesh:
        async with mesh_client(mesh.tracker_url) as client:
            (served,) = await client.mesh.models()
            request = GenerationRequest(served.name, tuple(random_prompt(PROMPT_LENGTH)), COUNT, SamplingParams())
            abandoned = aiter(client.engine.start(request))
            while not isinstance(await anext(abandoned), SampledToken):
                pass
            held = {name: status["sessions"] for name, status in (await client.node_status()).items()}
            assert held == dict.fromkeys(nodes, 1)
        for child in mesh.nodes.values():
            async with asyncio.timeout(60):  # nobody calls: the node looks by itself, every 5 s
                while not (told := await metrics_of(str(child.url))).get(EXPIRED):  # noqa: ASYNC110 - its clock is its own
                    await asyncio.sleep(0.1)
            assert (told[EXPIRED], told["meshnet_node_sessions"], told["meshnet_node_reserved_bytes"]) == (1, 0, 0)
        await abandoned.aclose()


async def test_a_node_with_no_bytes_for_sessions_is_answered_with_right_tokens(model: Path, tmp_path: Path) -> None:
    prompt = random_prompt(PROMPT_LENGTH)
    right = reference_greedy(reference_model(model), prompt, COUNT)
    nothing = {"tail": ("--cache-bytes", "0", "--max-sessions", "3", "--session-ttl", "90")}
    with process_mesh(str(model), {"head": "0-1", "tail": "2-3"}, tmp_path, more=nothing) as mesh:
        async with mesh_client(mesh.tracker_url) as client:
            answer = await client.answer(prompt, COUNT)
        health = await fetch_json(f"{mesh.nodes['tail'].url}/healthz")
    assert answer.ids == right
    assert answer.report["mode"] == "stateless"
    assert (health["budget_bytes"], health["max_sessions"], health["session_ttl_s"]) == (0, 3, 90.0)


@asynccontextmanager
async def under_way(client: MeshClient, prompt: list[int], count: int) -> AsyncGenerator[Generation]:
    (served,) = await client.mesh.models()
    generation = client.engine.start(GenerationRequest(served.name, tuple(prompt), count, SamplingParams()))
    try:
        yield generation
    finally:
        await generation.aclose()


async def tokens_of(generation: Generation, during: Callable[[int], Any]) -> list[int]:
    ids: list[int] = []
    async with aclosing(aiter(generation)) as events:
        async for event in events:
            if isinstance(event, SampledToken):
                ids.append(event.id)
                during(len(ids))
                await asyncio.sleep(0.01)
    return ids


async def ended(child: Child, within_s: float) -> int:
    return await asyncio.to_thread(child.process.wait, within_s)


async def test_a_node_that_is_told_to_stop_leaves_once_its_sessions_have_moved(model: Path, tmp_path: Path) -> None:
    prompt, count = random_prompt(PROMPT_LENGTH), 60
    right = reference_greedy(reference_model(model), prompt, count)
    nodes = {"head": "0-1", "tail-1": "2-3", "tail-2": "2-3"}
    with process_mesh(str(model), nodes, tmp_path) as mesh:
        async with mesh_client(mesh.tracker_url) as client, under_way(client, prompt, count) as generation:

            def stop_its_tail(made: int) -> None:
                if made == 20:
                    route = generation.report()["route"]
                    assert isinstance(route, list)
                    left.append(route[1]["node"])
                    mesh.nodes[left[0]].process.send_signal(signal.SIGTERM)

            left: list[str] = []
            ids = await tokens_of(generation, stop_its_tail)
            report = generation.report()
            assert await ended(mesh.nodes[left[0]], 60) == 0
            assert ids == right
            assert report["epochs"] == 2
            recoveries = report["recoveries"]
            assert isinstance(recoveries, list)
            (event,) = recoveries
            assert (event["error"], event["action"], event["node"]) == ("draining", "Reroute", left[0])
            assert "draining: 1 sessions have 30 s" in mesh.nodes[left[0]].log.read_text()


async def test_a_node_with_a_session_that_can_go_nowhere_stays_until_told_again(model: Path, tmp_path: Path) -> None:
    prompt = random_prompt(PROMPT_LENGTH)
    with process_mesh(str(model), {"head": "0-1", "tail": "2-3"}, tmp_path) as mesh:
        tail = mesh.nodes["tail"]
        async with mesh_client(mesh.tracker_url) as client, under_way(client, prompt, 300) as generation:
            events = aiter(generation)
            while not isinstance(await anext(events), SampledToken):
                pass
            tail.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(1)
            assert tail.process.poll() is None
            health = await fetch_json(f"{tail.url}/healthz")
            assert (health["draining"], health["sessions"]) == (True, 1)
            snapshot = await client.mesh.snapshot()
            assert {node.node_id: node.draining for node in snapshot.nodes} == {"head": False, "tail": True}
            assert isinstance(await anext(events), SampledToken)  # it goes on meanwhile
            told = await metrics_of(str(tail.url))
            assert told["meshnet_node_drains_total"] == 1
            assert told["meshnet_node_draining"] == 1
            tail.process.send_signal(signal.SIGTERM)
            assert await ended(tail, DRAIN_S / 2) == 0
