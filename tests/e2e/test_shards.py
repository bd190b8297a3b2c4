"""A real node that serves more models than it loads: right answers, and memory that follows."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest

import meshnet_process
from in_process_mesh import random_prompt, reference_greedy, reference_model
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_gateway.generation import GenerationRequest
from process_mesh import MeshClient, fetch_json, mesh_client, process_mesh
from tiny_models import save_tiny

pytestmark = pytest.mark.long

PROMPT, COUNT = random_prompt(9), 8
WIDE = {"hidden_size": 512, "intermediate_size": 1536, "head_dim": 64, "num_attention_heads": 8, "num_hidden_layers": 8}
FAMILIES = {"one": "llama", "two": "qwen3", "three": "mistral"}
TURNS = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three models wide enough for their memory to show, about 100 MB each."""
    base = tmp_path_factory.mktemp("models")
    return {
        name: save_tiny(family, base / name, seed=seed, **WIDE, initializer_range=0.05)
        for seed, (name, family) in enumerate(FAMILIES.items())
    }


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[int]]:
    return {name: reference_greedy(reference_model(folder), PROMPT, COUNT) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def node(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, psutil.Process]]:
    """The tracker's address and the node's process, with two of three models in memory."""
    also = [argument for name in ("two", "three") for argument in ("--also", f"{folders[name]}@0-7")]
    options = {"node": [*also, "--max-loaded-shards", "2"]}
    with process_mesh(str(folders["one"]), {"node": "0-7"}, tmp_path_factory.mktemp("logs"), more=options) as mesh:
        yield mesh.tracker_url, psutil.Process(mesh.nodes["node"].process.pid)


async def answer(client: MeshClient, model: str) -> list[int]:
    generation = client.engine.start(GenerationRequest(model, tuple(PROMPT), COUNT, SamplingParams()))
    try:
        async with aclosing(aiter(generation)) as events:
            return [event.id async for event in events if isinstance(event, SampledToken)]
    finally:
        await generation.aclose()


async def test_three_models_in_turn_and_interleaved_answer_right_and_memory_follows(
    node: tuple[str, psutil.Process], folders: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    tracker, process = node
    one_model = (folders["one"] / "model.safetensors").stat().st_size
    async with mesh_client(tracker) as client:
        summaries = await client.mesh.models()
        assert {model.name: model.complete for model in summaries} == dict.fromkeys(folders, True)
        (told,) = (await client.mesh.snapshot()).nodes
        assert [shard.loaded for shard in told.shards] == [True, True, False]
        for name in ("one", "two"):
            assert await answer(client, name) == expected[name]
        with_two = process.memory_info().rss
        for _ in range(TURNS):
            for name in ("three", "one", "two"):
                assert await answer(client, name) == expected[name]
                grown = process.memory_info().rss - with_two
                assert grown < one_model / 2, f"{grown} bytes more than with two models, of {one_model} each"
        names = list(folders) * 3
        assert await asyncio.gather(*(answer(client, name) for name in names)) == [expected[name] for name in names]
        assert process.memory_info().rss - with_two < one_model / 2
        status = await fetch_json(f"{told.url}/healthz")
        assert status["loaded_shards"] == 2
        assert status["sessions"] == 0
        assert status["shard_drops"] >= 3 * TURNS
        for model in summaries:  # of the one that is not loaded too
            files = await fetch_json(f"{told.url}/text/{model.fingerprint}")
            assert "config.json" in files


def test_mistakes_with_several_shards_say_what_is_right(folders: dict[str, Path], node: tuple[str, object]) -> None:
    one = str(folders["one"])
    mistakes = {
        ("--also", one): f"--also '{one}' is no shard; write MODEL@FIRST-LAST",
        ("--also", f"{one}@0-7"): "layers 0-7 of one are given twice; give each shard once",
        ("--also", f"{one}@0-8"): "one has layers 0-7; 0-8 goes beyond them",
        ("--max-loaded-shards", "0"): "Input should be greater than or equal to 1",
    }
    for arguments, message in mistakes.items():
        done = meshnet_process.run("node", one, "--layers", "0-7", "--tracker", node[0], "--port", "0", *arguments)
        assert done.returncode == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr


LOAD_AND_CLOSE = """
import gc, sys, psutil, torch
from pathlib import Path
from meshnet_core.layer_range import LayerRange
from meshnet_node.device_memory import share_heap
from meshnet_node.shard_work import ShardWork
from meshnet_node.shard_loader import plan_shard
share_heap()
torch.set_num_threads(1)
plan = plan_shard(Path(sys.argv[1]), LayerRange(0, 8), dtype=sys.argv[2], device="cpu")
def rss(): return psutil.Process().memory_info().rss
def turn():
    shard = plan.load()
    states = [shard.new_state(start) for start in (0, 3)]
    shard.forward([ShardWork(0, states[0], 0, 4, bytes(16), "float32")])
    gc.collect(); gc.freeze()
    held = rss(), shard.weight_bytes
    shard.close()
    return shard, *held
kept = [turn()[0]]  # warm: what the first forward allocates for good
before = rss()
for _ in range(4):
    shard, held, weights = turn()
    kept.append(shard)
    print(weights, held - before, rss() - before)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_memory_of_a_closed_shard_goes_back_to_the_system(family: str, dtype: str, tmp_path: Path) -> None:
    """With views made, a state alive, everything frozen against the garbage collector, and the shard itself kept."""
    folder = save_tiny(
        family, tmp_path / family, **(WIDE if family == "llama" else WIDE | {"moe_intermediate_size": 128})
    )
    done = subprocess.run(
        [sys.executable, "-c", LOAD_AND_CLOSE, str(folder), dtype], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    turns = [[int(number) for number in line.split()] for line in done.stdout.splitlines()]
    assert len(turns) == 4
    for weights, while_held, after in turns:
        assert while_held > 0.8 * weights
        # The threads that read take from the one heap, as a node's do: with heaps of their own, 20 MB stayed at times.
        # What stays of a turn is the modules, which are frozen.
        assert after < 0.25 * weights
