"""Nodes of this process behind real sockets, registered at a tracker as real ones are: what a test of whole parts needs
that must reach into them, such as for the protocol versions that each of them speaks.

Everything is production code but the process around it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from in_process_mesh import FINGERPRINT, MODEL
from meshnet_core.clock import SystemClock
from meshnet_core.frames import PROTOCOLS
from meshnet_core.ids import mint_boot_id
from meshnet_core.layer_range import LayerRange
from meshnet_core.membership import NodeInfo
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_core.stream_transport import WireTransport, transport_for
from meshnet_core.tracker_client import TrackerClient
from meshnet_core.wire_form import WireForm
from meshnet_gateway.generation import GenerationEngine, GenerationRequest
from meshnet_gateway.mesh import Mesh
from meshnet_node import torch_server
from meshnet_node.cache_store import CacheStore, StoreLimits
from meshnet_node.forward_lane import ForwardLane
from meshnet_node.hop_service import HopService
from meshnet_node.registration import Registration
from meshnet_node.sampler import sample
from meshnet_node.shard_loader import load_shard
from meshnet_node.shard_pool import LoadedShard, ShardPool


@dataclass
class SocketNode:
    """One start of a node."""

    service: HopService
    transport: WireTransport
    runner: web.AppRunner
    client: TrackerClient
    registration: Registration
    port: int

    async def stop(self) -> None:
        """Drain, say goodbye and close; sessions that are still here are lost."""
        self.service.drain()
        await self.registration.stop()
        await self.runner.cleanup()
        await self.service.close()
        await self.transport.close()
        await self.client.close()


@dataclass
class SocketFleet:
    """Nodes by name, all with layers of the tiny model in ``folder``; a node keeps its port over restarts."""

    folder: Path
    tracker_url: str
    nodes: dict[str, SocketNode] = field(default_factory=dict)
    layers: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    async def start(self, name: str, layers: str | None = None, *, protocols: range = PROTOCOLS) -> None:
        """Start a node, or start it again, and register it."""
        self.layers[name] = layers or self.layers[name]
        clock, boot = SystemClock(), mint_boot_id()
        backend = load_shard(self.folder, LayerRange.parse(self.layers[name]), dtype="float32", device="cpu")
        transport = transport_for(WireForm.STREAM, clock, protocols=protocols)
        service = HopService(
            boot=boot,
            shards=ShardPool([LoadedShard(backend, MODEL, FINGERPRINT, max_positions=512)]),
            store=CacheStore(StoreLimits(budget_bytes=2**30), clock),
            lane=ForwardLane(),
            transport=transport,
            sample=sample,
            clock=clock,
        )
        app = torch_server.create_app(
            service,
            boot=boot,
            status=service.status,
            text_files=lambda fingerprint: None,
            max_body=2**20,
            protocols=protocols,
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.ports.get(name, 0)).start()
        port = self.ports[name] = int(runner.addresses[0][1])

        def describe() -> NodeInfo:
            return NodeInfo(
                node_id=name,
                url=f"http://127.0.0.1:{port}",
                boot=boot,
                version="test",
                device="cpu",
                shards=tuple(shard.info() for shard in service.shards),
                sessions=len(service.store),
                draining=service.draining,
                protocol_min=protocols[0],
                protocol_max=protocols[-1],
            )

        client = TrackerClient(self.tracker_url)
        registration = Registration(client, describe)
        await registration.beat()
        registration.start()
        self.nodes[name] = SocketNode(service, transport, runner, client, registration, port)

    async def stop(self, name: str) -> None:
        await self.nodes.pop(name).stop()

    async def close(self) -> None:
        for name in list(self.nodes):
            await self.stop(name)


@asynccontextmanager
async def socket_fleet(folder: Path, tracker_url: str) -> AsyncIterator[SocketFleet]:
    fleet = SocketFleet(folder, tracker_url)
    try:
        yield fleet
    finally:
        await fleet.close()


@dataclass
class FleetClient:
    """A gateway's engine over a fleet."""

    mesh: Mesh
    transport: WireTransport
    engine: GenerationEngine

    async def answer(
        self, prompt: Sequence[int], max_tokens: int, during: Any = None
    ) -> tuple[list[int], dict[str, Any]]:
        """A whole answer; ``during``, a coroutine function, is awaited with the number of tokens so far."""
        generation = self.engine.start(GenerationRequest(MODEL, tuple(prompt), max_tokens, SamplingParams()))
        ids: list[int] = []
        try:
            async with aclosing(aiter(generation)) as events:
                async for event in events:
                    if isinstance(event, SampledToken):
                        ids.append(event.id)
                        if during is not None:
                            await during(len(ids))
        finally:
            await generation.aclose()
        return ids, generation.report()


@asynccontextmanager
async def fleet_client(tracker_url: str, *, protocols: range = PROTOCOLS) -> AsyncIterator[FleetClient]:
    """A gateway's part that speaks ``protocols``."""
    clock = SystemClock()
    async with AsyncExitStack() as closing:
        client = TrackerClient(tracker_url, protocols=protocols)
        closing.push_async_callback(client.close)
        mesh = Mesh(client, clock, protocols=protocols)
        closing.push_async_callback(mesh.close)
        transport = transport_for(WireForm.STREAM, clock, protocols=protocols)
        closing.push_async_callback(transport.close)
        yield FleetClient(mesh, transport, GenerationEngine(mesh, transport, clock))
