"""Frames as posts and on lean streams between real processes: the same tokens, in the form that was asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from meshnet_core.clock import SystemClock
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_core.stream_transport import transport_for
from meshnet_core.tracker_client import TrackerClient
from meshnet_core.wire_form import WireForm
from meshnet_gateway.generation import GenerationEngine, GenerationRequest
from meshnet_gateway.mesh import Mesh
from node_fleet import RoutesOver
from process_mesh import ProcessMesh, process_mesh
from tiny_models import num_layers, save_tiny

pytestmark = pytest.mark.long

PROMPT, COUNT = tuple(range(5, 40)), 16
HEAD, TAIL = "0-1", f"2-{num_layers('llama') - 1}"


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[ProcessMesh]:
    """A head, a tail, and one in its place that takes posts alone, as an older one does."""
    model = str(save_tiny("llama", tmp_path / "tiny-llama"))
    nodes = {"head": HEAD, "tail": TAIL, "older": TAIL}
    with process_mesh(model, nodes, tmp_path, more={"older": ["--wire", "http"]}) as mesh:
        yield mesh


@dataclass
class Client:
    """Runs answers over some of the nodes."""

    mesh: Mesh
    engine: GenerationEngine
    routes: RoutesOver

    async def answer(
        self, *names: str, after_five: Callable[[], None] | None = None
    ) -> tuple[list[int], dict[str, Any]]:
        """The tokens over the nodes named, and the report; ``after_five`` is called once there are five."""
        self.routes.names = set(names)
        (model,) = await self.mesh.models()
        generation = self.engine.start(GenerationRequest(model.name, PROMPT, COUNT, SamplingParams()))
        ids: list[int] = []
        try:
            async with aclosing(aiter(generation)) as events:
                async for event in events:
                    if isinstance(event, SampledToken):
                        ids.append(event.id)
                        if len(ids) == 5 and after_five is not None:
                            after_five()
        finally:
            await generation.aclose()
        return ids, generation.report()


@asynccontextmanager
async def client_of(running: ProcessMesh, form: WireForm) -> AsyncIterator[Client]:
    clock = SystemClock()
    tracker, transport = TrackerClient(running.tracker_url), transport_for(form, clock)
    mesh = Mesh(tracker, clock)
    routes = RoutesOver(mesh, set())
    try:
        yield Client(mesh, GenerationEngine(routes, transport, clock), routes)
    finally:
        await mesh.close()
        await transport.close()
        await tracker.close()


async def frames_taken(mesh: ProcessMesh, name: str) -> dict[str, float]:
    """How many frames a node has read so far, by form."""
    async with aiohttp.ClientSession() as session, session.get(f"{mesh.nodes[name].url}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        samples = (sample for family in families for sample in family.samples)
        return {one.labels["form"]: one.value for one in samples if one.name == "meshnet_node_frames_total"}


async def test_both_forms_give_the_same_tokens_each_where_it_is_spoken(mesh: ProcessMesh) -> None:
    async with client_of(mesh, WireForm.STREAM) as client:
        streamed, _ = await client.answer("head", "tail")
        mixed, _ = await client.answer("head", "older")
    assert len(streamed) == COUNT
    assert mixed == streamed
    assert await frames_taken(mesh, "head") == {"stream": 2 * COUNT}
    assert await frames_taken(mesh, "tail") == {"stream": COUNT}
    assert await frames_taken(mesh, "older") == {"http": COUNT}
    async with client_of(mesh, WireForm.HTTP) as client:
        assert (await client.answer("head", "tail"))[0] == streamed
    assert await frames_taken(mesh, "head") == {"stream": 2 * COUNT, "http": COUNT}


async def test_a_node_killed_in_mid_answer_costs_no_token(mesh: ProcessMesh) -> None:
    async with client_of(mesh, WireForm.STREAM) as client:
        undisturbed, _ = await client.answer("head", "tail")
        ids, report = await client.answer("head", "tail", after_five=lambda: kill(mesh, client))
    assert ids == undisturbed
    assert report["recoveries"]
    assert [hop["node"] for hop in report["route"]] == ["head", "older"]
    taken = await frames_taken(mesh, "older")
    assert taken["http"] > 0


def kill(mesh: ProcessMesh, client: Client) -> None:
    """Kill the tail; from here on the other one may take its place."""
    client.routes.names = {"head", "tail", "older"}
    mesh.nodes["tail"].process.kill()
