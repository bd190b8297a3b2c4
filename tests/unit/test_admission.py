"""Room and admission: more generations than the nodes have room for, nodes that keep nothing, nodes that leave."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from in_process_mesh import MODEL, add_node, random_prompt, reference_greedy, reference_model, tiny_mesh
from meshnet_core.clock import ManualClock
from meshnet_core.coverage import ModelSummary
from meshnet_core.demand import Demand
from meshnet_core.errors import CacheFullError, LayersUnavailableError, MissReason
from meshnet_core.frames import Frame, FrameReply
from meshnet_core.layer_range import LayerRange
from meshnet_core.open_document import OpenDocument, OpenReply, ProbeReply
from meshnet_core.prefix import Mark
from meshnet_core.route import Hop, Route
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_gateway import place
from meshnet_gateway.generation import GenerationEngine, GenerationRequest
from meshnet_gateway.waiting_room import NoRoomError, WaitingRoom
from meshnet_node import hop_service
from meshnet_node.cache_store import CacheStore, SessionKey, StoreLimits
from meshnet_node.shard_work import ShardResult, ShardWork
from virtual_time import LoopClock, run_virtually

PROMPT = random_prompt(17)
COUNT = 24


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[int]:
    return reference_greedy(reference_model(llama), PROMPT, COUNT)


async def run(
    engine: GenerationEngine,
    prompt: Sequence[int],
    count: int,
    during: Callable[[int], None] = lambda made: None,
) -> tuple[list[int], dict[str, object]]:
    """One answer of ``engine``; ``during`` is called after each token with how many there are."""
    answer = engine.start(GenerationRequest(MODEL, tuple(prompt), count, SamplingParams()))
    ids: list[int] = []
    try:
        async with aclosing(aiter(answer)) as events:
            async for event in events:
                if isinstance(event, SampledToken):
                    ids.append(event.id)
                    during(len(ids))
    finally:
        await answer.aclose()
    return ids, answer.report()


def recoveries(report: dict[str, object]) -> list[dict[str, object]]:
    events = report["recoveries"]
    assert isinstance(events, list)
    return events


# -- nodes that keep nothing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeping", [0, 1])
async def test_a_node_that_keeps_no_state_is_answered_with_right_tokens(
    llama: Path, expected: list[int], keeping: int
) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:
        add_node(mesh, llama, mesh.urls[keeping], ["0-1", "2-3"][keeping], StoreLimits(budget_bytes=0))
        ids, report = await run(mesh.engine(), PROMPT, COUNT)
        assert ids == expected
        assert report["mode"] == "stateless"
        assert [(event["error"], event["action"]) for event in recoveries(report)] == [("cache_full", "Stateless")]
        assert sum(mesh.slept) == 0
        assert mesh.held_sessions == 0


@pytest.mark.parametrize("hop", [0, 1])
@pytest.mark.parametrize(("chunk", "mode"), [(256, "cached"), (5, "stateless")])
async def test_a_node_that_misses_every_second_frame_is_answered_with_right_tokens(
    llama: Path, expected: list[int], hop: int, chunk: int, mode: str
) -> None:
    """Where a prefill is one frame, each gives a token before the next miss; one of several frames never ends."""
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:
        frames = itertools.count(1)
        store = mesh.services[mesh.urls[hop]].store

        def forget(url: str, frame: Frame) -> None:
            if url == mesh.urls[hop] and next(frames) % 2 == 0:
                store.drop(SessionKey(frame.session, hop), MissReason.EVICTED)

        mesh.transport.on_forward = forget
        tokens, report = await mesh.answer(PROMPT, COUNT, chunk=chunk)
        assert [token.id for token in tokens] == expected
        assert report["mode"] == mode
        assert mesh.services[mesh.urls[hop]].misses[MissReason.EVICTED] >= COUNT - 1
        assert mesh.held_sessions == 0


async def test_a_session_that_outgrows_a_node_goes_on_without_state(
    llama: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hop_service, "GROWTH_QUANTUM", 4)
    async with tiny_mesh(llama, ["0-1", "2-3"], limits=StoreLimits(budget_bytes=bytes_for(llama, 28))) as mesh:
        ids, report = await run(mesh.engine(), PROMPT, COUNT)
        assert ids == expected
        assert report["mode"] == "stateless"
        assert int(str(recoveries(report)[0]["after_tokens"])) > 4


def bytes_for(_: Path, positions: int) -> int:
    """Room for so many positions at hop 0 of the tiny llama cut in two: keys and values of two layers, and hidden
    states on their way."""
    return positions * (2 * 2 * 2 * 8 * 4 + 32 * 4)


# -- more generations than room ---------------------------------------------------------------------------------------


async def test_200_sessions_through_two_nodes_with_room_for_8(llama: Path) -> None:
    prompts = [random_prompt(5 + index, seed=index) for index in range(8)]
    model = reference_model(llama)
    right = [reference_greedy(model, prompt, 3) for prompt in prompts]
    limits = StoreLimits(budget_bytes=2**30, max_sessions=8)
    async with tiny_mesh(llama, ["0-1", "2-3"], limits=limits) as mesh:
        engine = mesh.engine()
        began: list[int] = []
        most = 0

        async def one(index: int) -> list[int]:
            def during(made: int) -> None:
                nonlocal most
                most = max(most, *(len(service.store) for service in mesh.services.values()))
                if made == 1:
                    began.append(index)

            ids, report = await run(engine, prompts[index % 8], 3, during)
            assert report["mode"] == "cached"
            return ids

        answers = await asyncio.gather(*(one(index) for index in range(200)))
        assert answers == [right[index % 8] for index in range(200)]
        assert most == 8
        # Nobody waits for more than those who came before and those who run beside it.
        assert max(abs(place - index) for place, index in enumerate(began)) < 16
        assert mesh.held_sessions == 0
        assert all(service.store.nbytes == 0 for service in mesh.services.values())
        assert engine.room.waiting == 0
        assert engine.room.waits == 192
        assert engine.room.turned_away == 0


async def test_who_is_preempted_waits_its_turn_and_answers_right(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hop_service, "GROWTH_QUANTUM", 4)
    prompts = [random_prompt(10, seed=index) for index in range(4)]
    model = reference_model(llama)
    right = [reference_greedy(model, prompt, 30) for prompt in prompts]
    async with tiny_mesh(llama, ["0-1", "2-3"], limits=StoreLimits(budget_bytes=bytes_for(llama, 70))) as mesh:
        engine = mesh.engine()
        answers = await asyncio.gather(*(run(engine, prompt, 30) for prompt in prompts))
        assert [ids for ids, _ in answers] == right
        reasons = {event.get("reason") for _, report in answers for event in recoveries(report)}
        assert reasons == {"evicted"}
        status = mesh.services[mesh.urls[0]].status()
        assert status["dropped"]["preempted"] > 0
        assert status["misses"]["evicted"] > 0
        assert mesh.held_sessions == 0


async def test_sessions_whose_steps_take_long_at_one_hop_are_not_evicted_at_the_other(
    llama: Path, expected: list[int]
) -> None:
    """The tail has room for one, and each has nothing to do there for most of the time."""
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:
        limits = StoreLimits(budget_bytes=2**30, max_sessions=1, running_s=0.0)
        tail = add_node(mesh, llama, mesh.urls[1], "2-3", limits)
        forward = mesh.backends[0].forward

        def slow(works: Sequence[ShardWork]) -> list[ShardResult | Exception]:
            time.sleep(0.05)
            return forward(works)

        mesh.backends[0].forward = slow  # type: ignore[method-assign]
        engine = GenerationEngine(mesh, mesh.transport, mesh.clock, chunk=4)
        answers = await asyncio.gather(*(run(engine, PROMPT, 6) for _ in range(3)))
        assert [ids for ids, _ in answers] == [expected[:6]] * 3
        assert [recoveries(report) for _, report in answers] == [[]] * 3
        assert tail.store.dropped == {MissReason.RELEASED: 3}


async def test_waiting_has_an_end_that_names_the_hop(llama: Path) -> None:
    limits = StoreLimits(budget_bytes=2**30, max_sessions=1)
    async with tiny_mesh(llama, ["0-1", "2-3"], limits=limits) as mesh:
        room = WaitingRoom(mesh.clock, max_wait_s=0.3)
        engine = GenerationEngine(mesh, mesh.transport, mesh.clock, room=room)
        first = engine.start(GenerationRequest(MODEL, tuple(PROMPT), 5, SamplingParams()))
        await anext(aiter(first))
        with pytest.raises(NoRoomError, match="no room was found") as caught:
            await run(engine, PROMPT, 5)
        assert caught.value.hop_index == 0
        await first.aclose()
        assert mesh.held_sessions == 0
        _, report = await run(engine, PROMPT, 5)
        assert report["epochs"] == 1


async def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind(llama: Path) -> None:
    limits = StoreLimits(budget_bytes=2**30, max_sessions=1)
    async with tiny_mesh(llama, ["0-1", "2-3"], limits=limits) as mesh:
        engine = mesh.engine()
        first = engine.start(GenerationRequest(MODEL, tuple(PROMPT), 5, SamplingParams()))
        await anext(aiter(first))
        waiting = asyncio.create_task(run(engine, PROMPT, 5))
        while not engine.room.waiting:  # noqa: ASYNC110 - the room has no event for tests
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert engine.room.waiting == 0
        await first.aclose()
        assert mesh.held_sessions == 0


# -- nodes that leave -------------------------------------------------------------------------------------------------


async def test_a_session_moves_from_a_node_that_drains(llama: Path, expected: list[int]) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3", "2-3"]) as mesh:
        left: list[str] = []
        held: list[int] = []

        def drain(made: int) -> None:
            if made == 9:
                left.append(mesh.transport.frames[-1][0])
                mesh.services[left[0]].drain()
            if left:
                held.append(len(mesh.services[left[0]].store))

        ids, report = await run(mesh.engine(), PROMPT, COUNT, drain)
        assert ids == expected
        assert report["epochs"] == 2
        (event,) = recoveries(report)
        assert event == {
            "after_tokens": 10,  # the token on its way brings the news
            "error": "draining",
            "action": "Reroute",
            "node": left[0].removeprefix("http://"),
        }
        assert held[:2] == [1, 1]
        assert held[-1] == 0


async def test_a_session_that_can_go_nowhere_ends_where_it_is(llama: Path, expected: list[int]) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:

        def drain(made: int) -> None:
            if made == 9:
                mesh.services[mesh.urls[0]].drain()
            for moment, hop in ((15, 1), (18, 0)):  # and even a miss does not drive it away
                if made == moment:
                    store = mesh.services[mesh.urls[hop]].store
                    (session,) = (held.document.session for held in store)
                    store.drop(SessionKey(session, hop), MissReason.EVICTED)

        ids, report = await run(mesh.engine(), PROMPT, COUNT, drain)
        assert ids == expected
        assert report["epochs"] == 3
        assert [event["error"] for event in recoveries(report)] == ["cache_miss"] * 2
        with pytest.raises(LayersUnavailableError, match="draining"):
            await run(mesh.engine(), PROMPT, 3)


async def test_a_session_keeps_its_place_until_it_has_another(llama: Path, expected: list[int]) -> None:
    """The only other node is full at first; when it has room, the session moves."""
    clock, full = ManualClock(), StoreLimits(budget_bytes=2**30, max_sessions=0)
    async with tiny_mesh(llama, ["0-1", "2-3"], clock=clock) as mesh:
        spare = add_node(mesh, llama, "http://node-2", "2-3", full)
        mesh.down.add("http://node-2")
        epochs: list[int] = []

        def drain(made: int) -> None:
            clock.advance(1)
            if made == 5:
                mesh.services[mesh.urls[1]].drain()
                mesh.down.clear()
            if made == 15:
                spare.store.limits = replace(full, max_sessions=1)
            epochs.append(mesh.transport.frames[-1][1].epoch)

        engine = mesh.engine()
        ids, report = await run(engine, PROMPT, COUNT, drain)
        assert ids == expected
        assert set(epochs[:15]) == {0}  # all on the state that there was
        assert (report["epochs"], engine.room.waits) == (2, 0)
        assert [hop["node"] for hop in report["route"]] == ["node-0", "node-2"]  # type: ignore[attr-defined]
        assert mesh.held_sessions == 0


@pytest.mark.parametrize("fault", ["the new hop hangs", "the old hop refuses"])
async def test_a_move_that_comes_to_nothing_costs_a_pause_at_most(
    llama: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "the new hop hangs":
        monkeypatch.setattr(place, "MOVE_OPEN_S", 0.05)
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:
        add_node(mesh, llama, "http://node-2", "2-3")
        mesh.down.add("http://node-2")
        open_, tried = mesh.transport.open, list[int]()

        async def faulty(url: str, document: OpenDocument) -> OpenReply:
            if fault == "the new hop hangs" and url == "http://node-2":
                tried.append(document.epoch)
                await asyncio.Event().wait()
            if fault == "the old hop refuses" and document.hop_index == 0 and document.epoch == 1:
                tried.append(document.epoch)
                raise CacheFullError("full on purpose", hop_index=0)
            return await open_(url, document)

        def drain(made: int) -> None:
            if made == 5:
                mesh.services[mesh.urls[1]].drain()
                mesh.down.clear()

        monkeypatch.setattr(mesh.transport, "open", faulty)
        ids, report = await run(mesh.engine(), PROMPT, COUNT, drain)
        assert ids == expected
        assert tried
        assert report["epochs"] == (1 if fault == "the new hop hangs" else 2)
        assert mesh.held_sessions == 0


async def test_a_stateless_session_moves_too(llama: Path, expected: list[int]) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3", "0-1"]) as mesh:
        first: list[str] = []

        def drain(token: object) -> None:
            if not first:
                first.append(mesh.transport.frames[0][0])
                mesh.services[first[0]].drain()

        tokens, report = await mesh.answer(PROMPT, COUNT, cache=False, during=lambda _, token: drain(token))
        assert [token.id for token in tokens] == expected
        assert first[0] not in {f"http://{hop['node']}" for hop in report["route"]}  # type: ignore[attr-defined]


# -- two gateways that know nothing of each other ---------------------------------------------------------------------


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
