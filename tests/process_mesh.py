"""A mesh of real processes on loopback for tests: a tracker and nodes, as a person starts them.

The generation loop runs in the test itself, over HTTP, so that answers are compared by token id.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from meshnet_cli.children import Child, Children
from meshnet_core.clock import SystemClock
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_core.stream_transport import WireTransport, transport_for
from meshnet_core.tracker_client import TrackerClient
from meshnet_core.wire_form import WireForm
from meshnet_gateway.generation import GenerationEngine, GenerationRequest
from meshnet_gateway.mesh import Mesh

START_TIMEOUT_S = 240.0  # the first start on a machine converts the GGUF


@dataclass
class ProcessMesh:
    """What runs; nodes by name.

    In a mesh with certificates ``home`` is where its parts find it, and ``tls`` what a client shows.
    """

    children: Children
    tracker_url: str
    model: str
    options: tuple[str, ...]
    nodes: dict[str, Child] = field(default_factory=dict)
    home: Path | None = None
    tls: ssl.SSLContext | None = None

    def start_node(self, name: str, layers: str, *more: str, wait: bool = True) -> Child:
        """One more node, holding ``layers``."""
        arguments = ["node", self.model, "--layers", layers, "--tracker", self.tracker_url, "--port", "0"]
        environment = {} if self.home is None else {"MESHNET_HOME": str(self.home)}
        child = self.children.start(name, [*arguments, "--name", name, *self.options, *more], environment)
        self.nodes[name] = child
        if wait:
            self.children.wait_ready(child, timeout_s=START_TIMEOUT_S)
        return child


@contextmanager
def process_mesh(
    model: str,
    nodes: Mapping[str, str],
    folder: Path,
    *,
    dtype: str = "float32",
    threads: int = 1,
    more: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[ProcessMesh]:
    """A tracker and ``nodes`` (name -> layers as people type them), all gone when the block is left.

    Args:
        folder: where logs go.
        more: further options, by node name.
    """
    with Children(folder) as children:
        tracker = children.start("tracker", ["tracker", "--port", "0"])
        children.wait_ready(tracker, timeout_s=60)
        mesh = ProcessMesh(children, str(tracker.url), model, ("--dtype", dtype, "--threads", str(threads)))
        for name, layers in nodes.items():
            mesh.start_node(name, layers, *(more or {}).get(name, ()), wait=False)
        children.wait_ready(*mesh.nodes.values(), timeout_s=START_TIMEOUT_S)
        yield mesh


@dataclass
class Answer:
    """Token ids, with the generation's report."""

    tokens: list[SampledToken]
    report: dict[str, Any]

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


class MeshClient:
    """Runs generations on a mesh, below the level of text."""

    def __init__(self, mesh: Mesh, transport: WireTransport) -> None:
        self.mesh = mesh
        self.engine = GenerationEngine(mesh, transport, SystemClock())

    async def answer(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams | None = None,
        *,
        cache: bool = True,
        stop_ids: frozenset[int] = frozenset(),
    ) -> Answer:
        """One whole answer of the mesh's only model."""
        (model,) = await self.mesh.models()
        request = GenerationRequest(
            model.name, tuple(prompt), max_tokens, sampling or SamplingParams(), stop_ids=stop_ids, cache=cache
        )
        generation = self.engine.start(request)
        tokens: list[SampledToken] = []
        try:
            async with aclosing(aiter(generation)) as events:
                tokens.extend([event async for event in events if isinstance(event, SampledToken)])
        finally:
            await generation.aclose()
        return Answer(tokens, generation.report())

    async def node_status(self) -> dict[str, dict[str, Any]]:
        """What each node says of itself, by name."""
        return {node["node"]: node for node in (await self.mesh.status())["nodes"]}


@asynccontextmanager
async def mesh_client(tracker_url: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[MeshClient]:
    """A client of the mesh at ``tracker_url``."""
    clock = SystemClock()
    client, transport = TrackerClient(tracker_url, tls=tls), transport_for(WireForm.STREAM, clock, tls=tls)
    mesh = Mesh(client, clock)
    try:
        yield MeshClient(mesh, transport)
    finally:
        await mesh.close()
        await transport.close()
        await client.close()


async def fetch_json(url: str) -> dict[str, Any]:
    """One JSON document by GET."""
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        document: dict[str, Any] = await response.json()
        return document
