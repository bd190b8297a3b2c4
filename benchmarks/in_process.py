"""A mesh within this process, each node on a device of its own: real shards, services and loop, no sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from meshnet_core.clock import SystemClock
from meshnet_core.coverage import ModelSummary, served_models
from meshnet_core.demand import Demand
from meshnet_core.ids import mint_boot_id
from meshnet_core.layer_range import LayerRange
from meshnet_core.membership import NodeInfo, Snapshot
from meshnet_core.planning import plan_route
from meshnet_core.route import Route
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_core.transport import InProcessTransport
from meshnet_gateway.generation import GenerationEngine, GenerationRequest
from meshnet_node.cache_store import CacheStore, StoreLimits
from meshnet_node.forward_lane import ForwardLane
from meshnet_node.hop_service import HopService
from meshnet_node.sampler import sample
from meshnet_node.shard_loader import load_shard
from meshnet_node.shard_pool import LoadedShard, ShardPool

MODEL = "checked"
FINGERPRINT = "0" * 64
BUDGET_BYTES = 2**31
MAX_POSITIONS = 512


class InProcessMesh:
    """One node for each of several layer ranges; gives routes over them as a tracker would.

    Args:
        threads: CPU threads of each node; torch's own number if not told.
        max_positions: of a session.
    """

    def __init__(self, threads: int | None = None, max_positions: int = MAX_POSITIONS) -> None:
        self._threads, self._max_positions = threads, max_positions
        self.transport = InProcessTransport()
        self._nodes: list[NodeInfo] = []
        self._services: list[HopService] = []
        self._clock = SystemClock()

    def add_node(self, folder: Path, layers: LayerRange, dtype: str, device: str) -> None:
        """Load ``layers`` on ``device`` and serve them."""
        name = f"node-{len(self._nodes)}"
        loaded = load_shard(folder, layers, dtype=dtype, device=device)
        loaded.use_kernels()  # as a node does, unless it is told otherwise
        shard = LoadedShard(loaded, MODEL, FINGERPRINT, self._max_positions)
        service = HopService(
            boot=mint_boot_id(),
            shards=ShardPool([shard]),
            store=CacheStore(StoreLimits(budget_bytes=BUDGET_BYTES), self._clock),
            lane=ForwardLane(threads=self._threads),
            transport=self.transport,
            sample=sample,
            clock=self._clock,
        )
        url = f"http://{name}"
        self.transport.endpoints[url] = service
        self._services.append(service)
        self._nodes.append(NodeInfo(name, url, service.boot, "checked", device.partition(":")[0], (shard.info(),)))

    async def model(self, name: str) -> ModelSummary:
        """The model, as the generation loop asks for it."""
        return next(model for model in served_models(Snapshot(tuple(self._nodes))) if model.name == name)

    async def route(self, model: ModelSummary, excluded: frozenset[str], demand: Demand | None = None) -> Route:
        """The route over all nodes."""
        return plan_route(Snapshot(tuple(self._nodes)), model.name, excluded, demand=demand)

    async def answer(
        self, prompt: Sequence[int], count: int, *, cache: bool = True, chunk: int = 256, top: int = 0
    ) -> list[SampledToken]:
        """``count`` greedy tokens, each with the logprobs of the ``top`` likeliest.

        Raises:
            RuntimeError: a failure was recovered from, which nothing here should need.
        """
        engine = GenerationEngine(self, self.transport, self._clock, chunk=chunk)
        request = GenerationRequest(MODEL, tuple(prompt), count, SamplingParams(logprobs=top), frozenset(), cache)
        generation = engine.start(request)
        try:
            async with aclosing(aiter(generation)) as events:
                tokens = [event async for event in events if isinstance(event, SampledToken)]
            report = generation.report()
        finally:
            await generation.aclose()
        if report["epochs"] != 1 or len(tokens) != count:
            raise RuntimeError(f"{len(tokens)} of {count} tokens came, with these failures: {report['recoveries']}")
        return tokens

    async def close(self) -> None:
        for service in self._services:
            await service.close()


@asynccontextmanager
async def in_process_mesh(
    folder: Path,
    splits: Sequence[LayerRange],
    devices: Sequence[str],
    *,
    dtype: str = "float32",
    threads: int | None = None,
    max_positions: int = MAX_POSITIONS,
) -> AsyncIterator[InProcessMesh]:
    """A node for each of ``splits``, on the device beside it."""
    mesh = InProcessMesh(threads, max_positions)
    try:
        for layers, device in zip(splits, devices, strict=True):
            mesh.add_node(folder, layers, dtype, device)
        yield mesh
    finally:
        await mesh.close()
