"""Real nodes that leave their layers to the tracker: they cover the model, make up for a death, and tear no answer."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

import pytest

from in_process_mesh import random_prompt, reference_greedy, reference_model
from mesh_identities import new_mesh
from meshnet_cli.children import Children
from meshnet_core.membership import Snapshot
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_core.tracker_client import TrackerClient
from meshnet_gateway.generation import GenerationRequest
from process_mesh import START_TIMEOUT_S, MeshClient, ProcessMesh, mesh_client
from tiny_models import save_tiny

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

LAYERS, COUNT = 12, 200
PROMPT = random_prompt(9)
MEMORY = "600K"  # of one node: six layers of the twelve at either end, with the room that is kept for sessions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    return reference_greedy(reference_model(folder), PROMPT, COUNT)


@contextmanager
def auto_mesh(folder: Path, logs: Path, *names: str, secured: bool = False) -> Iterator[ProcessMesh]:
    """A tracker, and nodes that were started together with ``--layers auto``; ``secured`` by certificates or not."""
    insecure = () if secured else ("--insecure",)
    options = ("--dtype", "float32", "--threads", "1", "--memory", MEMORY, *insecure)
    with Children(logs) as children:
        home = logs / "home" if secured else None
        tls = None if home is None else new_mesh(home / "mesh").credentials().client_context()
        environment = {} if home is None else {"MESHNET_HOME": str(home)}
        tracker = children.start("tracker", ["tracker", "--port", "0", *insecure], environment)
        children.wait_ready(tracker, timeout_s=START_TIMEOUT_S)
        mesh = ProcessMesh(children, str(tracker.url), str(folder), options, home=home, tls=tls)
        for name in names:
            mesh.start_node(name, "auto", wait=False)
        children.wait_ready(*mesh.nodes.values(), timeout_s=START_TIMEOUT_S)
        yield mesh


async def until(mesh: ProcessMesh, what: Callable[[dict[str, list[str]]], bool]) -> dict[str, list[str]]:
    """The layers that each node announces, draining ones left out, once they are so."""
    client = TrackerClient(mesh.tracker_url, tls=mesh.tls)
    try:
        async with asyncio.timeout(180):
            while not what(served := _served(await client.snapshot())):  # noqa: ASYNC110  other processes set no event
                await asyncio.sleep(0.2)
            return served
    finally:
        await client.close()


def _served(snapshot: Snapshot) -> dict[str, list[str]]:
    return {node.node_id: [str(shard.layers) for shard in node.shards] for node in snapshot.nodes if not node.draining}


def holds(*ranges: str) -> Callable[[dict[str, list[str]]], bool]:
    """Whether exactly these ranges are served, whoever has them."""
    return lambda served: sorted(layers for held in served.values() for layers in held) == sorted(ranges)


async def slow_answer(client: MeshClient, begun: asyncio.Event, go_on: asyncio.Event) -> list[int]:
    """Token ids of one answer that stops being read at its tenth token until ``go_on``."""
    (model,) = await client.mesh.models()
    generation = client.engine.start(GenerationRequest(model.name, tuple(PROMPT), COUNT, SamplingParams()))
    ids: list[int] = []
    try:
        async with aclosing(aiter(generation)) as events:
            async for event in events:
                if isinstance(event, SampledToken):
                    ids.append(event.id)
                if len(ids) == 10:
                    begun.set()
                    await go_on.wait()
    finally:
        await generation.aclose()
    return ids


async def test_three_nodes_cover_the_model_and_a_death_is_made_up_for(
    folder: Path, tmp_path: Path, expected: list[int]
) -> None:
    with auto_mesh(folder, tmp_path, "a", "b", "c") as mesh:
        async with mesh_client(mesh.tracker_url) as client:
            served = await until(mesh, holds("0-3", "4-7", "8-11"))
            assert sorted(served) == ["a", "b", "c"]
            assert (await client.answer(PROMPT, COUNT)).ids == expected
            mesh.nodes["b"].process.kill()
            await until(mesh, holds("0-5", "6-11"))
        async with mesh_client(mesh.tracker_url) as client:  # one that has seen no death
            assert (await client.answer(PROMPT, COUNT)).ids == expected


async def test_an_answer_goes_on_while_a_node_leaves_and_the_others_take_its_layers(
    folder: Path, tmp_path: Path, expected: list[int]
) -> None:
    with auto_mesh(folder, tmp_path, "a", "b", "c") as mesh:
        async with mesh_client(mesh.tracker_url) as client:
            await until(mesh, holds("0-3", "4-7", "8-11"))
            begun, go_on = asyncio.Event(), asyncio.Event()
            answer = asyncio.create_task(slow_answer(client, begun, go_on))
            await asyncio.wait_for(begun.wait(), 60)
            mesh.nodes["b"].process.send_signal(signal.SIGTERM)  # it drains: the answer runs on it for now
            await until(mesh, holds("0-5", "6-11"))
            go_on.set()
            assert await answer == expected


@pytest.mark.parametrize("secured", [False, True], ids=["without certificates", "with certificates"])
async def test_an_answer_goes_on_while_a_newcomer_makes_the_others_move(
    folder: Path, tmp_path: Path, expected: list[int], secured: bool
) -> None:
    with auto_mesh(folder, tmp_path, "a", "b", secured=secured) as mesh:
        assert mesh.tracker_url.startswith("https://" if secured else "http://")
        async with mesh_client(mesh.tracker_url, mesh.tls) as client:
            await until(mesh, holds("0-5", "6-11"))
            begun, go_on = asyncio.Event(), asyncio.Event()
            answer = asyncio.create_task(slow_answer(client, begun, go_on))
            await asyncio.wait_for(begun.wait(), 60)
            mesh.start_node("c", "auto")
            await until(mesh, lambda served: len(served) == 3 and all(served.values()))
            go_on.set()
            assert await answer == expected
            assert (await client.answer(PROMPT, COUNT)).ids == expected
