"""A mesh in this process: real shards of a tiny model on real forward lanes, joined without sockets.

Frames, stores, lanes and the generation loop are the production ones; only the transport and the tracker's place are
taken by their in-process counterparts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from meshnet_core.clock import Clock, SystemClock
from meshnet_core.coverage import ModelSummary, served_models
from meshnet_core.demand import Demand
from meshnet_core.errors import HopUnreachableError
from meshnet_core.frames import Frame, FrameReply, Phase
from meshnet_core.grammar import Grammar
from meshnet_core.ids import mint_boot_id
from meshnet_core.layer_range import LayerRange
from meshnet_core.membership import NodeInfo, ShardInfo, Snapshot
from meshnet_core.planning import plan_route
from meshnet_core.route import Route
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_core.transport import InProcessTransport
from meshnet_gateway.generation import Generation, GenerationEngine, GenerationRequest, PrefillProgress
from meshnet_node.cache_store import CacheStore, StoreLimits
from meshnet_node.forward_lane import ForwardLane
from meshnet_node.hop_service import HopService
from meshnet_node.model_backend import TorchModelShard
from meshnet_node.offered_shard import OfferedShard
from meshnet_node.sampler import sample
from meshnet_node.shard_loader import load_shard
from meshnet_node.shard_pool import LoadedShard, ShardPool
from tiny_models import VOCAB

MODEL = "tiny"
FINGERPRINT = "f" * 64


class RecordingTransport(InProcessTransport):
    """Notes every frame with the hop it went to; `on_forward` may raise or change things before it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[tuple[str, Frame]] = []
        self.on_forward: Callable[[str, Frame], None] = lambda url, frame: None

    async def forward(self, url: str, frame: Frame) -> FrameReply:
        self.frames.append((url, frame))
        self.on_forward(url, frame)
        return await super().forward(url, frame)


class _SleptClock:
    """A clock that goes on by what was slept, which took no time here."""

    def __init__(self, clock: Clock, slept: list[float]) -> None:
        self._clock, self._slept = clock, slept

    def now(self) -> float:
        return self._clock.now() + sum(self._slept)


def unmeasured(shard: ShardInfo) -> ShardInfo:
    return replace(
        shard, decode_ms=None, prefill_ms=None, decode_evidence=None, prefill_evidence=None, chunk_costs=None
    )


@dataclass
class TinyMesh:
    """The services by URL, in the order of the ranges given."""

    transport: RecordingTransport
    services: dict[str, HopService]
    clock: Clock
    down: set[str] = field(default_factory=set)
    slept: list[float] = field(default_factory=list)
    backends: list[TorchModelShard] = field(default_factory=list)  # in the order in which nodes were added
    measured: bool = False  # whether routes follow what was measured: how busy this machine is should not choose them

    @property
    def urls(self) -> list[str]:
        return list(self.services)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            tuple(
                NodeInfo(
                    node_id=url.removeprefix("http://"),
                    url=url,
                    boot=service.boot,
                    version="test",
                    device="cpu",
                    shards=tuple(
                        shard.info() if self.measured else unmeasured(shard.info()) for shard in service.shards
                    ),
                    sessions=len(service.store),
                    links=service.links.told() if self.measured else (),
                    draining=service.draining,
                )
                for url, service in self.services.items()
                if url not in self.down
            )
        )

    def _told(self, shard: ShardInfo) -> ShardInfo:
        return shard if self.measured else unmeasured(shard)

    async def model(self, name: str) -> ModelSummary:
        return next(model for model in served_models(self.snapshot()) if model.name == name)

    async def route(self, model: ModelSummary, excluded: frozenset[str], demand: Demand | None = None) -> Route:
        return plan_route(self.snapshot(), model.name, excluded, demand=demand)

    def kill(self, url: str) -> HopService:
        """As if the process died: nothing answers there, the tracker does not know yet."""
        del self.transport.endpoints[url]
        return self.services[url]

    def break_at(self, hop: int) -> None:
        """The node at this place of a route dies with its first decode step, and is listed no more."""
        broken: list[str] = []

        def break_once(url: str, frame: Frame) -> None:
            if frame.phase is Phase.DECODE and frame.hop_index == hop and not broken:
                broken.append(url)
                self.kill(url)
                self.down.add(url)
                raise HopUnreachableError("gone", hop_index=hop)

        self.transport.on_forward = break_once

    def engine(self, **options: Any) -> GenerationEngine:
        chunk = int(options.pop("chunk", 256))
        time = _SleptClock(self.clock, self.slept)
        return GenerationEngine(self, self.transport, time, chunk=chunk, sleep=self._note_sleep, **options)

    async def _note_sleep(self, seconds: float) -> None:
        """Backoff is noted, not sat out; the engine's clock goes on by it."""
        self.slept.append(seconds)
        await asyncio.sleep(0)

    async def answer(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams | None = None,
        *,
        cache: bool = True,
        chunk: int = 256,
        stop_ids: frozenset[int] = frozenset(),
        grammar: Grammar | None = None,
        during: Callable[[Generation, SampledToken], None] = lambda generation, token: None,
    ) -> tuple[list[SampledToken], dict[str, object]]:
        """Run one generation to its end; ``during`` is called after each token."""
        params = sampling or SamplingParams()
        request = GenerationRequest(MODEL, tuple(prompt), max_tokens, params, stop_ids, cache, grammar=grammar)
        generation = self.engine(chunk=chunk).start(request)
        tokens: list[SampledToken] = []
        try:
            async with aclosing(aiter(generation)) as events:
                async for event in events:
                    if isinstance(event, PrefillProgress):
                        continue
                    tokens.append(event)
                    during(generation, event)
        finally:
            await generation.aclose()
        return tokens, generation.report()

    @property
    def held_sessions(self) -> int:
        return sum(len(service.store) for service in self.services.values())


@asynccontextmanager
async def tiny_mesh(
    folder: Path,
    ranges: Sequence[str],
    *,
    clock: Clock | None = None,
    limits: StoreLimits | None = None,
    dtype: str = "float32",
    transport: RecordingTransport | None = None,
    text_files: Mapping[str, bytes] | None = None,
    measured: bool = False,
    quantize: str = "auto",
) -> AsyncIterator[TinyMesh]:
    """One node for each of ``ranges`` (inclusive, as people type them), all of the model in ``folder``."""
    torch.set_num_threads(1)
    time = clock or SystemClock()
    mesh = TinyMesh(transport or RecordingTransport(), {}, time, measured=measured)
    for index, layers in enumerate(ranges):
        url = f"http://node-{index}"
        add_node(mesh, folder, url, layers, limits, dtype, text_files=text_files, quantize=quantize)
    try:
        yield mesh
    finally:
        for service in mesh.services.values():
            await service.close()


def add_node(
    mesh: TinyMesh,
    folder: Path,
    url: str,
    layers: str,
    limits: StoreLimits | None = None,
    dtype: str = "float32",
    *,
    text_files: Mapping[str, bytes] | None = None,
    quantize: str = "auto",
) -> HopService:
    """A node at ``url``; one that was there before is replaced, as by a restart."""
    backend = load_shard(folder, LayerRange.parse(layers), dtype=dtype, device="cpu", quantize=quantize)
    mesh.backends.append(backend)
    shard = OfferedShard.held(LoadedShard(backend, MODEL, FINGERPRINT, max_positions=512))
    shard.text_files = text_files or {}
    service = HopService(
        boot=mint_boot_id(),
        shards=ShardPool([shard]),
        store=CacheStore(limits or StoreLimits(budget_bytes=2**30), mesh.clock),
        lane=ForwardLane(),
        transport=mesh.transport,
        sample=sample,
        clock=mesh.clock,
    )
    mesh.services[url] = service
    mesh.transport.endpoints[url] = service
    return service


def reference_model(folder: Path) -> PreTrainedModel:
    """The unsharded model, fp32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def reference_greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy continuation of the unsharded model, with no cache at all."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids that no model would write."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()
