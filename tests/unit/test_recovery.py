"""What follows a failure, carried out on an in-process mesh; `test_recovery_decisions` has the decisions."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from in_process_mesh import (
    MODEL,
    TinyMesh,
    add_node,
    random_prompt,
    reference_greedy,
    reference_model,
    tiny_mesh,
)
from meshnet_core.clock import ManualClock
from meshnet_core.coverage import ModelSummary
from meshnet_core.demand import Demand
from meshnet_core.errors import (
    BadFrameError,
    CacheMissError,
    DeadlineError,
    HopUnreachableError,
    LayersUnavailableError,
    MissReason,
)
from meshnet_core.frames import Frame, FrameReply, Phase
from meshnet_core.open_document import OpenDocument, OpenReply, ProbeReply
from meshnet_core.planning import plan_route
from meshnet_core.route import Route
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_core.transport import InProcessTransport
from meshnet_gateway import recovery
from meshnet_gateway.blame import BlameMemory
from meshnet_gateway.generation import GenerationEngine, GenerationRequest
from meshnet_gateway.generation_report import GenerationReport
from meshnet_gateway.hop_calls import HopCalls
from meshnet_gateway.mending import Mending
from meshnet_gateway.recovery import (
    Replay,
)
from meshnet_node.cache_store import SessionKey, StoreLimits
from meshnet_node.hop_service import HopService
from meshnet_node.model_backend import ShardResult, ShardWork
from tiny_models import save_tiny

PROMPT, COUNT = random_prompt(17), 16
MISS = CacheMissError("m", reason=MissReason.EVICTED)
LACKING = LayersUnavailableError("layers 2-3 lack")


# -- carried out ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[int]:
    return reference_greedy(reference_model(llama), PROMPT, COUNT)


async def run(
    engine: GenerationEngine, *, count: int = COUNT, replay: Replay | None = None, during: object = None
) -> tuple[list[int], dict[str, object]]:
    """One greedy answer of an engine; ``during(session, number of tokens)`` is called after each token."""
    request = GenerationRequest(MODEL, tuple(PROMPT), count, SamplingParams(), recovery=replay)
    generation = engine.start(request)
    ids: list[int] = []
    try:
        async for event in generation:
            if isinstance(event, SampledToken):
                ids.append(event.id)
                if callable(during):
                    during(generation.session, len(ids))
    finally:
        await generation.aclose()
    return ids, generation.report()


def evict_at(mesh: TinyMesh, *moments: int) -> object:
    def evict(session: str, made: int) -> None:
        if made in moments:
            hop = moments.index(made) % len(mesh.urls)
            mesh.services[mesh.urls[hop]].store.drop(SessionKey(session, hop), MissReason.EVICTED)

    return evict


@pytest.mark.parametrize("family", ["llama", "qwen3_5_moe_text"])
async def test_exact_recovery_in_bfloat16_gives_the_very_tokens(family: str, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path)
    last = "3" if family == "llama" else "4"
    async with tiny_mesh(folder, ["0-1", f"2-{last}"], dtype="bfloat16") as mesh:
        undisturbed, _ = await run(mesh.engine(chunk=5), count=40)
        for replay in (Replay.EXACT, Replay.FAST):
            mesh.transport.frames.clear()
            ids, report = await run(mesh.engine(chunk=5), count=40, replay=replay, during=evict_at(mesh, 9, 21, 33))
            assert report["epochs"] == 4
            replayed = [f for _, f in mesh.transport.frames if f.phase is Phase.DECODE and not f.sample]
            assert bool(replayed) is (replay is Replay.EXACT)
            if replay is Replay.EXACT:
                assert ids == undisturbed
        assert mesh.held_sessions == 0


async def test_a_replayed_position_is_refused_out_of_place(llama: Path) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:
        refused: list[str] = []

        def twist(url: str, frame: Frame) -> None:
            if frame.phase is Phase.DECODE and not refused:
                session = next(iter(mesh.services[url].store))
                for changes in ({"sample": 0}, {"position": 3}, {"seq_len": 2}):
                    values = {name: getattr(frame, name) for name in Frame.__slots__} | changes
                    with pytest.raises(BadFrameError) as caught:
                        session.check(Frame(**values))
                    refused.append(caught.value.message)

        mesh.transport.on_forward = twist
        await run(mesh.engine())
    assert "with sample 0" in refused[0]
    assert "inside the prompt of 17" in refused[1]
    assert "one position" in refused[2]


async def test_a_restart_is_told_from_an_eviction_by_the_boot_id(llama: Path, expected: list[int]) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:
        old = []

        def restart(_: str, made: int) -> None:
            if made == 5:
                old.append(mesh.kill(mesh.urls[1]))
                add_node(mesh, llama, mesh.urls[1], "2-3")

        ids, report = await run(mesh.engine(), during=restart)
        assert ids == expected
        (event,) = report["recoveries"]  # type: ignore[misc]
        assert (event["reason"], event["node"]) == ("restarted", "node-1")
        await old[0].close()


async def test_a_node_that_comes_back_with_other_layers_is_routed_around(llama: Path, expected: list[int]) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3", "2-3"]) as mesh:
        route = await mesh.route(await mesh.model(MODEL), frozenset())
        url, old = route.hops[1].url, []

        def restart(_: str, made: int) -> None:
            if made == 5:
                old.append(mesh.kill(url))
                add_node(mesh, llama, url, "1-2")

        ids, report = await run(mesh.engine(), during=restart)
        assert ids == expected
        assert [(event["reason"], event["action"]) for event in report["recoveries"]] == [  # type: ignore[attr-defined]
            ("restarted", "RePrefill"),
            ("range_mismatch", "Reroute"),
        ]
        await old[0].close()


@asynccontextmanager
async def late_once(mesh: TinyMesh, url: str, queued: int, at: int) -> AsyncIterator[list[str | None]]:
    """The hop at ``url`` is past the deadline once, and says when probed that ``queued`` frames wait there."""
    probed: list[str | None] = []
    service = mesh.services[url]

    async def probe(session: str | None) -> ProbeReply:
        probed.append(session)
        return ProbeReply(service.boot, None, queued)

    def late(to: str, frame: Frame) -> None:
        if to == url and frame.phase is Phase.DECODE and frame.position == at and not probed:
            raise DeadlineError("late on purpose", hop_index=frame.hop_index)

    service.probe = probe  # type: ignore[method-assign]
    mesh.transport.on_forward = late
    yield probed


async def test_a_busy_hop_is_asked_again_and_not_blamed(llama: Path, expected: list[int]) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3", "2-3"]) as mesh:
        engine = mesh.engine()
        route = await mesh.route(await mesh.model(MODEL), frozenset())
        async with late_once(mesh, route.hops[1].url, queued=3, at=21) as probed:
            ids, report = await run(engine)
        assert ids == expected
        assert report["epochs"] == 1
        assert len(probed) == 1
        assert engine.blame.excluded() == frozenset()


async def test_a_hop_that_is_gone_is_blamed_for_a_while(llama: Path, expected: list[int]) -> None:
    clock = ManualClock()
    async with tiny_mesh(llama, ["0-1", "2-3", "2-3"], clock=clock) as mesh:
        engine = mesh.engine()
        route = await mesh.route(await mesh.model(MODEL), frozenset())
        blamed, other = route.hops[1].node_id, {"node-1", "node-2"} - {route.hops[1].node_id}
        gone = []

        def kill(_session: str, made: int) -> None:
            if made == 5:
                gone.append(mesh.kill(route.hops[1].url))

        ids, report = await run(engine, during=kill)
        assert ids == expected
        assert report["epochs"] == 2
        assert engine.blame.excluded() == {blamed}
        assert {event["node"] for event in report["recoveries"]} == {blamed}  # type: ignore[attr-defined]
        mesh.transport.endpoints[route.hops[1].url] = gone[0]  # it is back
        _, later = await run(engine)
        assert {hop["node"] for hop in later["route"]} == {"node-0", *other}  # type: ignore[attr-defined]
        mesh.down.add(f"http://{other.pop()}")
        _, alone = await run(engine)
        assert blamed in {hop["node"] for hop in alone["route"]}  # type: ignore[attr-defined]
        assert engine.blame.excluded() == frozenset()  # it served an answer to its end


async def test_a_hop_that_is_late_and_idle_is_left_out_of_this_answer_alone(llama: Path, expected: list[int]) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3", "2-3"]) as mesh:
        engine = mesh.engine()
        route = await mesh.route(await mesh.model(MODEL), frozenset())
        async with late_once(mesh, route.hops[1].url, queued=0, at=21):
            ids, report = await run(engine)
        assert ids == expected
        assert report["epochs"] == 2
        assert {hop["node"] for hop in report["route"]} == {"node-0", "node-1", "node-2"} - {route.hops[1].node_id}  # type: ignore[attr-defined]
        assert engine.blame.excluded() == frozenset()


@pytest.mark.parametrize("others", [1, 2])
async def test_a_hop_that_its_neighbour_cannot_reach_is_not_blamed_though_it_answers_us(
    llama: Path, expected: list[int], others: int
) -> None:
    """Both halves have a spare; what the first node sends to the second never comes, or to either of them."""
    async with tiny_mesh(llama, ["0-1", "2-3", "0-1", "2-3"]) as mesh:
        engine = mesh.engine()

        async def rather_the_same_head(
            model: ModelSummary, excluded: frozenset[str], demand: Demand | None = None
        ) -> Route:
            others = frozenset({"node-2"}) if "node-0" not in excluded else frozenset()
            return plan_route(mesh.snapshot(), model.name, excluded | others, demand=demand)

        mesh.route = rather_the_same_head  # type: ignore[method-assign]
        route = await mesh.route(await mesh.model(MODEL), frozenset())
        cut, tails = route.hops[0], {"node-1", "node-3"}
        broken = {route.hops[1].node_id} if others == 1 else tails
        last: list[str] = []

        def lose(url: str, frame: Frame) -> None:
            if frame.hop_index == 0:
                last[:] = [url]
            elif last == [cut.url] and url.removeprefix("http://") in broken and frame.position > 20:
                raise HopUnreachableError("no way there", hop_index=frame.hop_index)

        mesh.transport.on_forward = lose
        ids, report = await run(engine)
        assert ids == expected
        nodes = [hop["node"] for hop in report["route"]]  # type: ignore[attr-defined]
        assert report["epochs"] == 1 + others
        if others == 1:
            assert nodes == [cut.node_id, *(tails - broken)]
            assert engine.blame.excluded() == frozenset()
        else:
            assert nodes[0] != cut.node_id
            assert engine.blame.excluded() == {cut.node_id}
        assert mesh.held_sessions == 0


async def test_an_open_whose_connection_broke_once_is_no_reason_to_blame(
    llama: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3", "2-3"]) as mesh:
        open_, broken = mesh.transport.open, set[int]()

        async def once_broken(url: str, document: OpenDocument) -> OpenReply:
            if document.hop_index not in broken:
                broken.add(document.hop_index)
                if document.hop_index:  # once before it was carried out, once after
                    await open_(url, document)
                raise HopUnreachableError("broken on purpose", hop_index=document.hop_index)
            return await open_(url, document)

        monkeypatch.setattr(mesh.transport, "open", once_broken)
        engine = mesh.engine()
        ids, report = await run(engine)
        assert broken == {0, 1}
        assert ids == expected
        assert (report["epochs"], report["recoveries"]) == (1, [])
        assert engine.blame.excluded() == frozenset()


async def test_a_hop_left_by_a_route_change_is_freed_at_once(llama: Path, expected: list[int]) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3", "2-3"]) as mesh:
        route = await mesh.route(await mesh.model(MODEL), frozenset())
        left = mesh.services[route.hops[1].url]
        held: list[int] = []
        async with late_once(mesh, route.hops[1].url, queued=0, at=21):
            ids, _ = await run(mesh.engine(), during=lambda _session, made: held.append(len(left.store)))
        assert ids == expected
        assert held[3] == 1
        assert held[-1] == 0


async def test_a_node_that_a_route_change_moves_to_another_place_keeps_nothing_of_the_old_one(
    llama: Path, expected: list[int]
) -> None:
    """It was the second of two hops, and is the last of three."""
    async with tiny_mesh(llama, ["0-1", "2-3", "0-0", "1-1"]) as mesh:
        store, held = mesh.services[mesh.urls[1]].store, []

        def kill(_session: str, made: int) -> None:
            if made == 6:
                mesh.kill(mesh.urls[0])
                mesh.down.add(mesh.urls[0])
            held.append([session.document.hop_index for session in store])

        ids, report = await run(mesh.engine(), during=kill)
        assert ids == expected
        assert [hop["node"] for hop in report["route"]] == ["node-2", "node-3", "node-1"]  # type: ignore[attr-defined]
        assert held == [[1]] * 6 + [[2]] * (COUNT - 6)


async def test_a_frame_that_waits_past_its_deadline_is_joined_by_its_retry(llama: Path, expected: list[int]) -> None:
    async with tiny_mesh(llama, ["0-3"]) as mesh:
        (service,) = mesh.services.values()
        backend = mesh.backends[0]
        forward, gate = backend.forward, threading.Event()
        slow: list[int] = []

        def sometimes_slow(works: Sequence[ShardWork]) -> list[ShardResult | Exception]:
            if works[0].position == 20:
                slow.append(20)
                gate.wait(30)
            return forward(works)

        come = mesh.transport.forward

        async def impatient_once(url: str, frame: Frame) -> FrameReply:
            late = frame.position == 20 and not gate.is_set()
            return await come(url, replace(frame, deadline_ms=300) if late else frame)

        async def probe(session: str | None) -> ProbeReply:
            gate.set()
            return ProbeReply(service.boot, None, 1)

        service.probe = probe  # type: ignore[method-assign]
        backend.forward = sometimes_slow  # type: ignore[method-assign]
        mesh.transport.forward = impatient_once  # type: ignore[method-assign]
        ids, report = await run(mesh.engine())
        assert ids == expected
        assert slow == [20]
        assert report["epochs"] == 1
        assert [event["action"] for event in report["recoveries"]] == ["Retry"]  # type: ignore[attr-defined]
        assert mesh.held_sessions == 0


# -- layers that lack, and a cache that comes back --------------------------------------------------------------------


@pytest.mark.parametrize(("away_s", "comes_back"), [(50.0, True), (70.0, False)])
async def test_layers_that_lack_are_waited_for_as_long_as_a_step_may_take(
    llama: Path, expected: list[int], away_s: float, comes_back: bool
) -> None:
    clock = ManualClock()
    async with tiny_mesh(llama, ["0-1", "2-3"], clock=clock) as mesh:
        died: list[float] = []
        gone: list[HopService] = []

        async def sleep(seconds: float) -> None:
            clock.advance(seconds)
            if died and clock.now() >= died[0] + away_s:
                mesh.down.clear()
                mesh.transport.endpoints[mesh.urls[1]] = gone[0]

        def kill(_session: str, made: int) -> None:
            if made == 5 and not died:
                died.append(clock.now())
                gone.append(mesh.kill(mesh.urls[1]))
                if len(died) == 1:
                    mesh.down.add(mesh.urls[1])

        engine = GenerationEngine(mesh, mesh.transport, clock, step_deadline_s=60.0, sleep=sleep)
        if comes_back:
            ids, _ = await run(engine, during=kill)
            assert ids == expected
        else:
            with pytest.raises(LayersUnavailableError, match="2-3"):
                await run(engine, during=kill)
            assert clock.now() - died[0] <= 61


async def test_a_dead_node_that_is_still_listed_does_not_shorten_the_wait(llama: Path, expected: list[int]) -> None:
    """It is let in again and again, and fails each time: that is the wait, and no cause to give up."""
    clock = ManualClock()
    async with tiny_mesh(llama, ["0-1", "2-3"], clock=clock) as mesh:
        died: list[float] = []
        gone: list[HopService] = []

        async def sleep(seconds: float) -> None:
            clock.advance(seconds)
            if died and clock.now() >= died[0] + 50:
                mesh.transport.endpoints[mesh.urls[1]] = gone[0]

        def kill(_session: str, made: int) -> None:
            if made == 5:
                died.append(clock.now())
                gone.append(mesh.kill(mesh.urls[1]))

        engine = GenerationEngine(mesh, mesh.transport, clock, step_deadline_s=60.0, sleep=sleep)
        ids, _ = await run(engine, during=kill)
        assert ids == expected


async def test_an_answer_that_never_began_waits_no_longer_than_its_dead_node_is_listed(llama: Path) -> None:
    """Whoever asks then is told at once which layers lack; who asked a little earlier need not wait for a minute."""
    clock = ManualClock()
    async with tiny_mesh(llama, ["0-1", "2-3"], clock=clock) as mesh:
        mesh.kill(mesh.urls[1])
        died = clock.now()

        async def sleep(seconds: float) -> None:
            clock.advance(seconds)
            if clock.now() >= died + 12:
                mesh.down.add(mesh.urls[1])

        engine = GenerationEngine(mesh, mesh.transport, clock, step_deadline_s=60.0, sleep=sleep)
        with pytest.raises(LayersUnavailableError, match="2-3"):
            await run(engine)
        assert 12 <= clock.now() - died <= 20


async def test_waiting_for_room_is_no_part_of_the_patience_with_lacking_layers() -> None:
    clock, slept = ManualClock(), list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    calls = HopCalls("s-1", InProcessTransport(), sleep)
    report = GenerationReport("s-1", 3, clock)
    mending = Mending(calls, report, BlameMemory(clock), clock, sleep, cache=True, patience_s=60.0)
    mending.opened()
    await mending.after(MISS, None)
    clock.advance(100)  # in the waiting room
    assert await mending.after(LACKING, None) is None
    clock.advance(60)
    with pytest.raises(LayersUnavailableError):
        await mending.after(LACKING, None)
    mending.opened()
    clock.advance(100)
    assert await mending.after(LACKING, None) is None  # another want, another wait


@pytest.mark.parametrize("heals", [True, False])
async def test_a_session_without_state_tries_a_cache_again(
    llama: Path, monkeypatch: pytest.MonkeyPatch, heals: bool
) -> None:
    monkeypatch.setattr(recovery, "STATELESS_TOKENS", 6)
    right = reference_greedy(reference_model(llama), PROMPT, 40)
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:
        store = mesh.services[mesh.urls[1]].store

        def forget(url: str, frame: Frame) -> None:
            healed = heals and any(not sent.cache for _, sent in mesh.transport.frames)
            if url == mesh.urls[1] and frame.cache and frame.position > 0 and not healed:
                store.drop(SessionKey(frame.session, 1), MissReason.EVICTED)

        mesh.transport.on_forward = forget
        ids, report = await run(mesh.engine(chunk=5), count=40)
        assert ids == right
        actions = [event["action"] for event in report["recoveries"]]  # type: ignore[attr-defined]
        cached = [frame for url, frame in mesh.transport.frames if url == mesh.urls[1] and frame.cache]
        if heals:
            assert (report["mode"], report["stateless_tokens"]) == ("mixed", 6)
            assert actions.count("Stateless") == 1
        else:
            assert (report["mode"], report["stateless_tokens"]) == ("stateless", 40)
            assert actions.count("Stateless") == 3  # at the start, and after 6 and 12 tokens more; 24 more are not made
            assert all(frame.phase is Phase.PREFILL for frame in cached)
        assert mesh.held_sessions == 0


async def test_a_cache_that_has_no_room_is_not_waited_for_where_it_goes_on_without(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "STATELESS_TOKENS", 6)
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:
        engine = mesh.engine()
        other = engine.start(GenerationRequest(MODEL, tuple(PROMPT), 60, SamplingParams()))
        forgotten: list[int] = []

        def forget(url: str, frame: Frame) -> None:
            if url == mesh.urls[1] and frame.cache and frame.position > 0 and not forgotten:
                mesh.services[url].store.drop(SessionKey(frame.session, 1), MissReason.EVICTED)

        mesh.transport.on_forward = forget
        occupied = False

        async def occupy() -> None:
            """From now on the nodes have room for the other one alone, which is running."""
            forgotten.append(1)
            await anext(aiter(other))
            for service in mesh.services.values():
                taken = service.store.taken(stateless=False)
                service.store.limits = StoreLimits(budget_bytes=taken)

        generation = engine.start(GenerationRequest(MODEL, tuple(PROMPT), 30, SamplingParams()))
        engine.chunk = 5
        ids: list[int] = []
        async for event in generation:
            if isinstance(event, SampledToken):
                ids.append(event.id)
                if not occupied:
                    occupied = True
                    await occupy()
        assert ids == reference_greedy(reference_model(llama), PROMPT, 30)
        report = generation.report()
        assert (report["mode"], report.get("waited_s")) == ("stateless", None)
        assert engine.room.waits == 0
        await generation.aclose()
        await other.aclose()
        assert mesh.held_sessions == 0
