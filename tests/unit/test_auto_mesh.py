"""Nodes that leave their layers to a tracker, all in one process: real shards, movers and desk, whole generations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from in_process_mesh import MODEL, RecordingTransport, TinyMesh, random_prompt, reference_greedy, reference_model
from meshnet_core.clock import ManualClock, SystemClock
from meshnet_core.ids import mint_boot_id
from meshnet_core.layer_range import LayerRange
from meshnet_core.membership import NodeInfo, ShardInfo, Snapshot
from meshnet_core.placeable import Placeable
from meshnet_core.sampling import SampledToken
from meshnet_gateway.generation import Generation, GenerationEngine
from meshnet_node.cache_store import CacheStore, StoreLimits
from meshnet_node.forward_lane import ForwardLane
from meshnet_node.hop_service import HopService
from meshnet_node.model_files import open_model
from meshnet_node.offered_shard import OfferedShard
from meshnet_node.placeable_model import PlaceableModel
from meshnet_node.sampler import sample
from meshnet_node.shard_mover import ShardMover
from meshnet_node.shard_pool import ShardPool
from meshnet_tracker.directory import Directory
from meshnet_tracker.placement_desk import MOVES_EVERY_S, SETTLE_S, PlacementDesk
from tiny_models import save_tiny

LAYERS, COUNT = 12, 60
PROMPT = random_prompt(9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("models") / MODEL, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    return reference_greedy(reference_model(folder), PROMPT, COUNT)


def alike(shard: ShardInfo) -> ShardInfo:
    return replace(shard, decode_ms=1.0, prefill_ms=0.1, decode_evidence=None, prefill_evidence=None)


@dataclass
class AutoMesh(TinyMesh):
    """Nodes with memory for half of the model each; ``tick`` is a heartbeat of all of them."""

    folder: Path = Path()
    time: ManualClock = field(default_factory=ManualClock)  # the tracker's
    movers: dict[str, ShardMover] = field(default_factory=dict)
    boots: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model_there = PlaceableModel(open_model(str(self.folder)), dtype="float32", device="cpu")
        self.facts = self.model_there.facts()
        self.memory = 4 * max(self.facts.elements(0, 6), self.facts.elements(6, 12))
        self.directory = Directory(self.time, lease_s=1e6)
        self.desk = PlacementDesk(self.time, self.directory.snapshot)

    def engine(self, **options: float) -> GenerationEngine:
        """One that waits for real, since shards are loaded in real time."""
        chunk = int(options.pop("chunk", 256))
        return GenerationEngine(self, self.transport, self.clock, chunk=chunk, **options)

    def snapshot(self) -> Snapshot:
        return self.directory.snapshot()

    def offer(self, layers: LayerRange) -> OfferedShard:
        plan = self.model_there.plan(self.folder, layers)
        info = ShardInfo(
            MODEL, self.facts.fingerprint, layers, LAYERS, plan.hidden_size, 512, plan.dtype, plan.weight_bytes
        )
        return OfferedShard(info, plan.load)

    def announce(self, name: str) -> NodeInfo:
        url = f"http://{name}"
        service, mover = self.services.get(url), self.movers.get(name)
        node = NodeInfo(
            node_id=name,
            url=url,
            boot=self.boots.setdefault(name, mint_boot_id()),
            version="test",
            device="cpu",
            # All alike: how busy this machine is should not decide who holds what.
            shards=() if service is None else tuple(alike(shard.info()) for shard in service.shards),
            placement=Placeable(self.memory, "float32", self.facts, None if mover is None else mover.target),
        )
        self.directory.announce(node)
        return node

    def start(self, *names: str) -> None:
        """Together: announced, told, loaded."""
        for name in names:
            self.desk.ask(self.announce(name))
        self.time.advance(SETTLE_S)
        wishes = {name: self.desk.ask(self.directory.require(name)).layers for name in names}
        for name, layers in wishes.items():
            assert layers is not None
            self._serve(name, layers)
        for name in names:
            self.announce(name)

    def _serve(self, name: str, layers: LayerRange) -> None:
        pool = ShardPool([self.offer(layers)])
        pool.load_first(lambda offer, done, total: None)
        service = HopService(
            boot=self.boots[name],
            shards=pool,
            store=CacheStore(StoreLimits(budget_bytes=2**30), self.clock),
            lane=ForwardLane(),
            transport=self.transport,
            sample=sample,
            clock=self.clock,
        )

        async def announce() -> None:
            if name in self.movers:
                self.announce(name)

        self.movers[name] = ShardMover(
            pool,
            layers,
            make_offer=self.offer,
            fits_beside=lambda offer: True,
            announce=announce,
            make_idle=lambda shard: service.store.evict_idle(lambda held: held.shard is shard),
        )
        self.services[f"http://{name}"] = self.transport.endpoints[f"http://{name}"] = service

    def end(self, name: str) -> ShardMover:
        """As if the process was killed and its lease over."""
        del self.transport.endpoints[f"http://{name}"]
        self.directory.leave(name)
        return self.movers.pop(name)

    def tick(self) -> None:
        for name, mover in self.movers.items():
            mover.told(self.desk.ask(self.announce(name)))

    def served(self) -> list[str]:
        return sorted(str(shard.layers) for node in self.snapshot().nodes for shard in node.shards)

    async def until_served(self, *ranges: str) -> None:
        async with asyncio.timeout(60):
            while self.served() != sorted(ranges):  # noqa: ASYNC110  what changes it sets no event
                await asyncio.sleep(0.01)


@asynccontextmanager
async def auto_mesh(folder: Path, *names: str) -> AsyncIterator[AutoMesh]:
    mesh = AutoMesh(RecordingTransport(), {}, SystemClock(), folder=folder)
    mesh.start(*names)

    async def beat() -> None:
        while True:
            mesh.tick()
            await asyncio.sleep(0.02)

    beating = asyncio.create_task(beat())
    try:
        yield mesh
    finally:
        beating.cancel()
        for mover in mesh.movers.values():
            await mover.close()
        for service in mesh.services.values():
            await service.close()


def at_token(number: int, do: Callable[[], object]) -> Callable[[Generation, SampledToken], None]:
    """For `TinyMesh.answer`: ``do`` once, after so many tokens."""
    seen: list[int] = []

    def during(_: Generation, token: SampledToken) -> None:
        seen.append(token.id)
        if len(seen) == number:
            do()

    return during


async def test_nodes_that_start_together_cover_the_model(folder: Path, expected: list[int]) -> None:
    async with auto_mesh(folder, "a", "b", "c") as mesh:
        assert mesh.served() == ["0-3", "4-7", "8-11"]
        tokens, report = await mesh.answer(PROMPT, COUNT)
        assert [token.id for token in tokens] == expected
        await asyncio.sleep(0.1)
        assert not any(mover.moves for mover in mesh.movers.values())
        assert not report["recoveries"]


async def test_an_answer_outlives_a_death_whose_layers_the_others_take_over(folder: Path, expected: list[int]) -> None:
    async with auto_mesh(folder, "a", "b", "c") as mesh:
        (dead,) = [name for name, mover in mesh.movers.items() if mover.target == LayerRange(4, 8)]

        tokens, report = await mesh.answer(PROMPT, COUNT, during=at_token(10, lambda: mesh.end(dead)))
        assert [token.id for token in tokens] == expected
        assert report["recoveries"]
        await mesh.until_served("0-5", "6-11")


async def test_an_answer_does_not_notice_that_the_nodes_under_it_move(folder: Path, expected: list[int]) -> None:
    async with auto_mesh(folder, "a", "b") as mesh:
        assert mesh.served() == ["0-5", "6-11"]

        def join() -> None:
            mesh.time.advance(MOVES_EVERY_S)
            mesh.start("c")

        tokens, report = await mesh.answer(PROMPT, COUNT, during=at_token(10, join))
        assert [token.id for token in tokens] == expected
        assert not report["recoveries"]
        await mesh.until_served("0-3", "4-7", "8-11")
        tokens, _ = await mesh.answer(PROMPT, COUNT)
        assert [token.id for token in tokens] == expected
