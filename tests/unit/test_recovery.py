"""What follows a failure, carried out on an in-process mesh; `test_recovery_decisions` has the decisions."""

from __future__ import annotations

from pathlib import Path

import pytest

from in_process_mesh import (
    MODEL,
    TinyMesh,
    add_node,
    reference_greedy,
    reference_model,
    tiny_mesh,
)
from meshnet_core.clock import ManualClock
from meshnet_core.errors import (
    BadFrameError,
    CacheMissError,
    LayersUnavailableError,
    MissReason,
)
from meshnet_core.frames import Frame, Phase
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
from meshnet_node.frame_terms import check_terms
from meshnet_node.hop_service import HopService
from recovery_runs import COUNT, PROMPT, late_once, run
from tiny_models import save_tiny

MISS = CacheMissError("m", reason=MissReason.EVICTED)
LACKING = LayersUnavailableError("layers 2-3 lack")


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[int]:
    return reference_greedy(reference_model(llama), PROMPT, COUNT)


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
                        check_terms(session, Frame(**values))
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
