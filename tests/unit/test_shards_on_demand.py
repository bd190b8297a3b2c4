"""A node that offers more shards than it loads: real shards of tiny models, whole generations, one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from in_process_mesh import RecordingTransport, TinyMesh, random_prompt, reference_greedy, reference_model
from meshnet_core.clock import Clock, ManualClock, SystemClock
from meshnet_core.errors import BadFrameError, CacheFullError, HopFailedError, MeshnetError, MissReason
from meshnet_core.ids import mint_boot_id
from meshnet_core.layer_range import LayerRange
from meshnet_core.membership import ShardInfo
from meshnet_core.open_document import OpenDocument
from meshnet_core.planning import plan_route
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_gateway.generation import Generation, GenerationRequest
from meshnet_node import shard_line
from meshnet_node.cache_store import CacheStore, SessionKey, StoreLimits
from meshnet_node.forward_lane import ForwardLane
from meshnet_node.hop_service import HopService
from meshnet_node.hop_session import HopSession
from meshnet_node.offered_shard import OfferedShard, Progress
from meshnet_node.sampler import sample
from meshnet_node.shard_loader import load_shard, plan_shard
from meshnet_node.shard_pool import ShardPool
from meshnet_node.shard_work import ShardWork
from tiny_models import save_tiny

FAMILIES = {"plain": "llama", "hybrid": "qwen3_5_text", "conv": "lfm2"}
URL = "http://node"
PROMPT, COUNT = random_prompt(13), 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_tiny(family, tmp_path_factory.mktemp(name)) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[int]]:
    return {name: reference_greedy(reference_model(folder), PROMPT, COUNT) for name, folder in folders.items()}


def offer(name: str, folder: Path, layers: LayerRange | None = None) -> OfferedShard:
    """The shard of ``layers``, all of them if not given, as the command line plans it."""
    total = plan_shard(folder, LayerRange(0, 1)).num_layers
    plan = plan_shard(folder, layers or LayerRange(0, total), dtype="float32", device="cpu")
    known = ShardInfo(
        name, name * 3, plan.layers, total, plan.hidden_size, 512, plan.dtype, weight_bytes=plan.weight_bytes
    )
    return OfferedShard(known, plan.load)


@dataclass
class OneNode:
    """A mesh of one node."""

    mesh: TinyMesh
    service: HopService

    @property
    def pool(self) -> ShardPool:
        return self.service.shards

    @property
    def loaded(self) -> list[str]:
        return [offer.known.model for offer in self.pool if offer.shard is not None]

    def start(self, model: str, *, cache: bool = True) -> Generation:
        request = GenerationRequest(model, tuple(PROMPT), COUNT, SamplingParams(), cache=cache)
        return self.mesh.engine().start(request)

    async def answer(self, model: str, *, cache: bool = True) -> list[int]:
        generation = self.start(model, cache=cache)
        try:
            return await rest_of(generation)
        finally:
            await generation.aclose()

    def document(self, model: str, **changes: object) -> OpenDocument:
        """What opens a session on ``model``."""
        route = plan_route(self.mesh.snapshot(), model)
        fields: dict[str, object] = {
            "session": f"s-{model}",
            "epoch": 0,
            "hop_index": 0,
            "route": route,
            "wire_dtype": "float32",
            "hidden_size": 32,
            "cache": True,
            "sampling": SamplingParams(),
            "prompt_length": len(PROMPT),
            "prefill_length": len(PROMPT),
            "expected_length": len(PROMPT) + COUNT,
            "step_deadline_ms": 20_000,
            "history": tuple(PROMPT),
        }
        return OpenDocument(**(fields | changes))  # type: ignore[arg-type]


@asynccontextmanager
async def one_node(
    offers: Sequence[OfferedShard],
    max_loaded: int | None,
    *,
    clock: Clock | None = None,
    limits: StoreLimits | None = None,
) -> AsyncIterator[OneNode]:
    time = clock or SystemClock()
    mesh = TinyMesh(RecordingTransport(), {}, time)
    service = HopService(
        boot=mint_boot_id(),
        shards=ShardPool(offers, max_loaded=max_loaded, clock=time),
        store=CacheStore[HopSession](limits or StoreLimits(budget_bytes=2**30), time),
        lane=ForwardLane(),
        transport=mesh.transport,
        sample=sample,
        clock=time,
    )
    mesh.services[URL] = mesh.transport.endpoints[URL] = service
    try:
        yield OneNode(mesh, service)
    finally:
        await service.close()


async def rest_of(generation: Generation) -> list[int]:
    async with aclosing(aiter(generation)) as events:
        return [event.id async for event in events if isinstance(event, SampledToken)]


async def next_token(generation: Generation) -> int:
    async for event in aiter(generation):
        if isinstance(event, SampledToken):
            return event.id
    raise AssertionError("the answer ended")


async def test_each_of_three_models_asked_in_turn_answers_with_two_in_memory(
    folders: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    async with one_node([offer(*item) for item in folders.items()], 2) as node:
        for turn in range(2):
            for name in folders:
                assert await node.answer(name, cache=turn == 0) == expected[name]
                assert name in node.loaded
                assert len(node.loaded) <= 2
        assert node.pool.leases == 0
        assert (node.pool.loads, node.pool.drops) == (6, 4)


async def test_a_model_asked_for_again_and_again_stays(folders: dict[str, Path]) -> None:
    async with one_node([offer(*item) for item in folders.items()], 2) as node:
        for name in ("plain", "hybrid", "plain", "conv", "plain", "hybrid", "plain"):
            await node.answer(name)
            assert "plain" in node.loaded
        assert node.pool.loads == 4


async def test_answers_under_way_keep_their_models_and_the_third_waits(
    folders: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    async with one_node([offer(*item) for item in folders.items()], 2) as node:
        first, second = node.start("plain"), node.start("hybrid")
        begun = {"plain": await next_token(first), "hybrid": await next_token(second)}
        third = asyncio.create_task(node.answer("conv"))
        await asyncio.sleep(0.3)
        assert not third.done()
        assert node.loaded == ["plain", "hybrid"]
        assert [begun["plain"], *await rest_of(first)] == expected["plain"]
        await first.aclose()
        assert await third == expected["conv"]
        assert node.loaded == ["hybrid", "conv"]
        assert [begun["hybrid"], *await rest_of(second)] == expected["hybrid"]
        await second.aclose()


async def test_many_at_once_on_three_models_with_place_for_one_are_all_answered(
    folders: dict[str, Path], expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_line, "TURN_S", 0.5)
    async with one_node([offer(*item) for item in folders.items()], 1) as node:
        names = list(folders) * 4
        async with asyncio.timeout(240):
            answers = await asyncio.gather(*(node.answer(name) for name in names))
        assert answers == [expected[name] for name in names]
        assert node.pool.leases == len(node.service.store) == 0


async def test_two_ranges_of_one_model_on_one_node(folders: dict[str, Path], expected: dict[str, list[int]]) -> None:
    halves = [offer("plain", folders["plain"], LayerRange(0, 2)), offer("plain", folders["plain"], LayerRange(2, 4))]
    async with one_node(halves, 2) as node:
        assert await node.answer("plain") == expected["plain"]
    async with one_node(halves, 1) as node:
        with pytest.raises(CacheFullError, match=r"needs 2 shards .* raise its --max-loaded-shards"):
            await node.service.open(node.document("plain", history=()))
        assert node.pool.loads == 0


async def test_a_model_that_cannot_be_loaded_says_why_and_the_others_go_on(
    folders: dict[str, Path], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    broken = offer("conv", folders["conv"])

    def load(progress: Progress) -> None:
        raise OSError("the disk is gone")

    broken.load = load  # type: ignore[assignment]
    async with one_node([offer("plain", folders["plain"]), broken], 1) as node:
        assert await node.answer("plain") == expected["plain"]
        with pytest.raises(MeshnetError, match=r"conv could not be loaded: the disk is gone"):
            await node.answer("conv")
        assert await node.answer("plain") == expected["plain"]
        assert node.pool.leases == 0


async def test_terms_that_cannot_be_met_load_nothing(folders: dict[str, Path]) -> None:
    async with one_node([offer("plain", folders["plain"])], 1) as node:
        for wrong in ({"hidden_size": 7}, {"expected_length": 10_000}, {"history": ()}):
            with pytest.raises(BadFrameError):
                await node.service.open(node.document("plain", **wrong))
        assert node.pool.loads == 0
        with pytest.raises(BadFrameError, match="outside the vocabulary"):
            await node.service.open(node.document("plain", history=(10_000,) * len(PROMPT)))
        assert node.pool.leases == 0


async def test_an_open_and_its_retry_during_the_load_are_one_session(folders: dict[str, Path]) -> None:
    async with one_node([offer("plain", folders["plain"])], 1) as node:
        document = node.document("plain")
        replies = await asyncio.gather(*(node.service.open(document) for _ in range(4)))
        assert len(set(replies)) == 1
        assert (node.pool.loads, node.pool.leases, len(node.service.store)) == (1, 1, 1)


async def test_a_session_released_during_the_load_holds_nothing(folders: dict[str, Path]) -> None:
    async with one_node([offer("plain", folders["plain"])], 1) as node:
        opening = asyncio.create_task(node.service.open(node.document("plain")))
        await asyncio.sleep(0)
        await node.service.release("s-plain")
        with pytest.raises(MeshnetError) as caught:
            await opening
        assert caught.value.details()["reason"] == MissReason.RELEASED
        assert node.pool.leases == len(node.service.store) == 0


@pytest.mark.parametrize("way", ["released", "expired", "evicted", "failed", "epoch_stale"])
async def test_whichever_way_a_session_leaves_its_lease_ends(folders: dict[str, Path], way: str) -> None:
    clock = ManualClock()
    limits = StoreLimits(budget_bytes=2**30, max_sessions=1)
    async with one_node([offer("plain", folders["plain"])], 1, clock=clock, limits=limits) as node:
        service, store = node.service, node.service.store
        await service.open(node.document("plain"))
        assert node.pool.leases == 1
        left = 0
        match way:
            case "released":
                await service.release("s-plain")
            case "expired":
                clock.advance(store.limits.ttl_s + 1)
                store.sweep()
            case "evicted":
                clock.advance(store.limits.running_s + 1)
                await service.open(node.document("plain", session="s-new"))
                left = 1
            case "failed":
                store.drop(SessionKey("s-plain", 0), MissReason.FAILED)
            case "epoch_stale":
                await service.open(node.document("plain", epoch=1))
                left = 1
        assert node.pool.leases == len(store) == left
        assert store.dropped[MissReason(way)] == 1


async def test_a_session_that_idles_does_not_keep_its_shard(folders: dict[str, Path]) -> None:
    clock = ManualClock()
    offers = [offer("plain", folders["plain"]), offer("conv", folders["conv"])]
    async with one_node(offers, 1, clock=clock) as node:
        await node.service.open(node.document("plain"))
        with pytest.raises(CacheFullError, match="in use"):
            await node.service.open(node.document("conv"))
        clock.advance(node.service.store.limits.running_s + 1)
        await node.service.open(node.document("conv"))
        assert node.loaded == ["conv"]
        assert [held.document.session for held in node.service.store] == ["s-conv"]


def test_a_closed_shard_holds_no_weights_and_runs_nothing(folders: dict[str, Path]) -> None:
    backend = load_shard(folders["plain"], LayerRange(0, 4), dtype="float32", device="cpu")
    state = backend.new_state(2)
    backend.close()
    backend.close()
    assert list(backend._model.parameters()) == []
    work = ShardWork(2, state, 0, 1, bytes(4 * 32), "float32")
    (result,) = backend.forward([work])
    assert isinstance(result, HopFailedError)
    with pytest.raises(HopFailedError, match="unloaded"):
        backend.new_state(2)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_plan_knows_what_loading_will_take(folders: dict[str, Path], name: str) -> None:
    for layers in (LayerRange(0, 2), LayerRange(1, 3), LayerRange(2, 4)):
        plan = plan_shard(folders[name], layers, dtype="bfloat16", device="cpu")
        shard = plan.load()
        assert (plan.num_layers, plan.hidden_size, plan.dtype) == (shard.num_layers, shard.hidden_size, shard.dtype)
        assert plan.max_positions == shard.max_positions
        assert plan.weight_bytes == pytest.approx(shard.weight_bytes, rel=0.02)
