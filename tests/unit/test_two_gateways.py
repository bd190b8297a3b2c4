"""Two gateways that know nothing of each other, at nodes with room for one session."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from admission_runs import run
from meshnet_core.coverage import ModelSummary
from meshnet_core.demand import Demand
from meshnet_core.frames import Frame, FrameReply
from meshnet_core.layer_range import LayerRange
from meshnet_core.open_document import OpenDocument, OpenReply, ProbeReply
from meshnet_core.prefix import Mark
from meshnet_core.route import Hop, Route
from meshnet_core.sampling import SampledToken
from meshnet_gateway.generation import GenerationEngine
from meshnet_gateway.waiting_room import WaitingRoom
from meshnet_node.cache_store import CacheStore, SessionKey, StoreLimits
from virtual_time import LoopClock, run_virtually


@dataclass
class Kept:
    nbytes: int = 1

    def cancel(self) -> None:
        """Nothing runs."""


@dataclass
class OneSlot:
    """A node with room for one session: a real store, and frames that take a while; no tensors."""

    delay: Callable[[], float]
    store: CacheStore[Kept] = field(
        default_factory=lambda: CacheStore(StoreLimits(budget_bytes=10, max_sessions=1), LoopClock())
    )

    async def open(self, document: OpenDocument) -> OpenReply:
        await asyncio.sleep(self.delay())
        self.store.admit(SessionKey(document.session, document.hop_index), document.epoch, Kept(), 1)
        await asyncio.sleep(self.delay())
        return OpenReply("boot", 1)

    async def forward(self, frame: Frame) -> FrameReply:
        with self.store.lease(SessionKey(frame.session, frame.hop_index), frame.epoch):
            await asyncio.sleep(self.delay())
        return FrameReply(frame.position + frame.seq_len, (SampledToken(7),))

    async def release(self, session: str, through_epoch: int | None = None, keep: tuple[Mark, ...] = ()) -> int:
        await asyncio.sleep(self.delay())
        return self.store.release(session, through_epoch)

    async def probe(self, session: str | None) -> ProbeReply:
        return ProbeReply("boot", None, 0)


@dataclass
class TwoSlots:
    """Routes and transport over two such nodes, every call with a delay of its own."""

    nodes: dict[str, OneSlot]

    async def model(self, name: str) -> ModelSummary:
        return ModelSummary(name, "f" * 64, 2, 8, 64, True, (), ("float32",))

    async def route(self, model: ModelSummary, excluded: frozenset[str], demand: Demand | None = None) -> Route:
        hops = tuple(Hop(url[7:], url, LayerRange(index, index + 1)) for index, url in enumerate(self.nodes))
        return Route(model.name, model.fingerprint, 2, hops)

    async def open(self, url: str, document: OpenDocument) -> OpenReply:
        return await self.nodes[url].open(document)

    async def forward(self, url: str, frame: Frame) -> FrameReply:
        return await self.nodes[url].forward(frame)

    async def release(
        self, url: str, session: str, through_epoch: int | None = None, keep: tuple[Mark, ...] = ()
    ) -> int:
        return await self.nodes[url].release(session, through_epoch, keep)

    async def probe(self, url: str, session: str | None) -> ProbeReply:
        return await self.nodes[url].probe(session)


def test_two_gateways_at_two_nodes_with_room_for_one_never_block_each_other() -> None:
    """A thousand rounds: both open at once, each may get one node and be refused by the other."""

    async def scene() -> tuple[int, float]:
        chance = random.Random(1)
        mesh = TwoSlots({f"http://{name}": OneSlot(lambda: chance.uniform(0, 0.02)) for name in "ab"})
        clock = LoopClock()
        engines = [GenerationEngine(mesh, mesh, clock, room=WaitingRoom(clock, draw=chance.random)) for _ in range(2)]
        longest = 0.0
        for _ in range(1000):
            began = clock.now()
            answers = await asyncio.gather(*(run(engine, [1, 2], 2) for engine in engines))
            assert [ids for ids, _ in answers] == [[7, 7], [7, 7]]
            longest = max(longest, clock.now() - began)
        assert all(len(node.store) == 0 for node in mesh.nodes.values())
        return sum(engine.room.waits for engine in engines), longest

    waits, longest = run_virtually(scene)
    assert waits > 500  # they did stand in each other's way
    assert longest < 20
