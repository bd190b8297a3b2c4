"""language-pipes over two nodes on loopback, as a system to compare: its own command starts it, its API is asked.

It lives in an environment of its own, since it pins another transformers; made for version 2.5. The first node has
the text, the first half of the layers and the API, the second node the other half, in bfloat16 and without encryption.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.memory import peak_rss
from benchmarks.models import PreparedModel
from benchmarks.openai_peer import OpenAiSystem, openai_system
from benchmarks.peer_process import PeerProcess, free_port, peer_process, until
from benchmarks.systems import Run

_GIB = 2**30
LOADED = "successfully loaded on"  # in a node's log, once it has its layers
PLACE = "benchmarks"  # models have names of two parts


class LanguagePipesSystem:
    """Two running nodes, spoken to from outside; see `language_pipes_system`."""

    def __init__(self, spoken: OpenAiSystem, pids: dict[str, int]) -> None:
        self.name = spoken.name
        self._spoken = spoken
        self._pids = pids

    async def run(self, prompt: Sequence[int], new_tokens: int) -> Run:
        """See `System` and `OpenAiSystem.run`."""
        return await self._spoken.run(prompt, new_tokens)

    def peak_rss(self) -> dict[str, int | None]:
        """See `System`."""
        return {name: peak_rss(pid) for name, pid in self._pids.items()}


def layer_bytes(checkpoint: Path) -> tuple[int, int]:
    """How many decoder layers a safetensors file has, and bytes of the first."""
    with checkpoint.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    layers: dict[int, int] = {}
    for name, tensor in header.items():
        if name.startswith("model.layers."):
            start, stop = tensor["data_offsets"]
            number = int(name.split(".")[2])
            layers[number] = layers.get(number, 0) + stop - start
    return len(layers), layers[0]


def memory_for(layers: int, each: int) -> float:
    """GiB with which a node takes exactly ``layers`` of ``each`` bytes."""
    return (layers + 0.5) * each / _GIB


def config_of(name: str, model: str, memory: float, peer_port: int, more: str = "") -> str:
    """A node's TOML file, with ``memory`` GiB for layers."""
    return f"""
node_id = "{name}"
network_ip = "127.0.0.1"
peer_port = {peer_port}
{more}
[[layer_models]]
model_id = "{model}"
device = "cpu"
memory = {memory}
data_type = 16
"""


@asynccontextmanager
async def language_pipes_system(
    name: str, python: Path, prepared: PreparedModel, threads: int
) -> AsyncIterator[LanguagePipesSystem]:
    """Start two nodes with the half of the layers each, wait until they answer, and end them with the block.

    Raises:
        RuntimeError: one ended, or they did not answer in time; what they said is on standard error.
    """
    folder = Path(tempfile.mkdtemp(prefix="meshnet-bench-"))
    model = f"{PLACE}/{prepared.name}"
    layers, each = layer_bytes(Path(prepared.folder) / "model.safetensors")
    api, first, second = free_port(), free_port(), free_port()
    head = f'job_port = {api}\nend_models = ["{model}"]'
    tail = f'bootstrap_nodes = [{{ address = "127.0.0.1", port = {first} }}]'
    configs = {
        "pipes-node-1": config_of("node-1", model, memory_for(layers // 2, each), first, head),
        "pipes-node-2": config_of("node-2", model, memory_for(layers - layers // 2, each), second, tail),
    }
    try:
        async with AsyncExitStack() as running:
            processes, pids = [], {}
            session = await running.enter_async_context(aiohttp.ClientSession())
            for node, config in configs.items():
                home = folder / node
                _models(home / "models" / model / "data", prepared)
                (home / "node.toml").write_text(config, "utf-8")
                environment = {
                    "LP_APP_DIR": str(home),
                    "LP_MODEL_DIR": str(home / "models"),
                    "HF_HUB_OFFLINE": "1",
                    "OMP_NUM_THREADS": str(threads),
                    "PYTHONPATH": "",
                }
                command = [str(python), "-m", "language_pipes.cli", "-c", str(home / "node.toml"), "run"]
                process = await running.enter_async_context(peer_process(command, environment))
                processes.append(process)
                pids[node] = process.pid
                # The second node asks the first one which layers are left.
                await until(processes, partial(_has_layers, process))
            await until(processes, partial(_serves, session, api, model))
            async with openai_system(name, f"http://127.0.0.1:{api}/v1", model) as spoken:
                yield LanguagePipesSystem(spoken, pids)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _models(folder: Path, prepared: PreparedModel) -> None:
    folder.mkdir(parents=True)
    for source in (Path(prepared.texts or ""), Path(prepared.folder)):
        for file in source.iterdir():
            if not (folder / file.name).exists():
                (folder / file.name).symlink_to(file)


async def _has_layers(node: PeerProcess) -> bool:
    return LOADED in node.said()


async def _serves(session: aiohttp.ClientSession, port: int, model: str) -> bool:
    """Whether the first node knows all layers of ``model``."""
    try:
        async with session.get(f"http://127.0.0.1:{port}/v1/models") as response:
            return model in await response.text()
    except aiohttp.ClientError:
        return False
