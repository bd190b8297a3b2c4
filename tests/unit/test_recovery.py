"""What follows a failure: the decision as a table, the memory of blame, and both carried out on an in-process mesh."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
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
from meshnet_core.errors import (
    BadFrameError,
    CacheMissError,
    DeadlineError,
    DrainingError,
    HopFailedError,
    HopUnreachableError,
    LayersUnavailableError,
    MeshnetError,
    MissReason,
    ProtocolMismatchError,
)
from meshnet_core.frames import Frame, Phase
from meshnet_core.open_document import OpenDocument, OpenReply, ProbeReply
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_gateway.blame import BACKOFF_S, MAX_BACKOFF_S, MAX_NODES, REMEMBERED_S, BlameMemory
from meshnet_gateway.epoch_frames import EpochFrames
from meshnet_gateway.generation import GenerationEngine, GenerationRequest
from meshnet_gateway.recovery import (
    BUSY_RETRIES,
    MAX_ATTEMPTS,
    MAX_RETRIES,
    MISSES_BEFORE_STATELESS,
    Action,
    Fail,
    History,
    Probe,
    Replay,
    RePrefill,
    Reroute,
    Retry,
    Stateless,
    next_action,
)
from meshnet_node.cache_store import SessionKey
from meshnet_node.model_backend import ShardResult, ShardWork
from tiny_models import save_tiny

PROMPT, COUNT = random_prompt(17), 16
MISS = CacheMissError("m", reason=MissReason.EVICTED)
OTHER_LAYERS = CacheMissError("m", reason=MissReason.RANGE_MISMATCH)
GONE, LATE = HopUnreachableError("gone"), DeadlineError("late")
BROKEN, LACKING = HopFailedError("broken"), LayersUnavailableError("layers 2-3 lack")


# -- the decision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "history", "expected"),
    [
        (MISS, History(), RePrefill()),
        (MISS, History(failures=(MISS,) * MISSES_BEFORE_STATELESS), Stateless()),
        (OTHER_LAYERS, History(), Reroute(frozenset({"b"}))),
        (OTHER_LAYERS, History(failures=(MISS,), excluded=frozenset({"a"})), Reroute(frozenset({"a", "b"}), 0.2)),
        (GONE, History(), Retry(0.0)),
        (GONE, History(retries=MAX_RETRIES), Probe()),
        (GONE, History(retries=MAX_RETRIES, busy=True), Retry(0.1)),
        (GONE, History(retries=MAX_RETRIES, busy=False), Reroute(frozenset({"b"}))),
        (GONE, History(retries=MAX_RETRIES + BUSY_RETRIES), Reroute(frozenset({"b"}))),
        (LATE, History(), Probe()),
        (LATE, History(busy=True), Retry(0.1)),
        (LATE, History(busy=False), Reroute(frozenset({"b"}))),
        (LATE, History(retries=BUSY_RETRIES, busy=True), Reroute(frozenset({"b"}))),
        (LATE, History(excluded=frozenset({"a"}), busy=False), Reroute(frozenset({"a", "b"}))),
        (DrainingError("d"), History(), Reroute(frozenset({"b"}))),
        (ProtocolMismatchError("p"), History(), Reroute(frozenset({"b"}))),
        (BROKEN, History(), RePrefill()),
        (BROKEN, History(failures=(BROKEN,)), Reroute(frozenset({"b"}), 0.2)),
        (LACKING, History(), Fail(LACKING)),
        (LACKING, History(failures=(GONE,), excluded=frozenset({"b"})), Reroute(frozenset(), 0.2)),
        (LACKING, History(failures=(GONE,), failing_s=60.0, patience_s=60.0), Fail(LACKING)),
        (LACKING, History(failures=(BROKEN, LACKING), failing_s=60.0, patience_s=60.0), Fail(BROKEN)),
        (GONE, History(failures=(LACKING,) * MAX_ATTEMPTS), Fail(LACKING)),
        (MISS, History(failures=(LACKING,) * MAX_ATTEMPTS), Fail(MISS)),
    ],
)
def test_what_follows_a_failure_of_node_b(failure: MeshnetError, history: History, expected: Action) -> None:
    assert next_action(failure, "b", history) == expected


def test_a_bad_frame_that_was_not_cut_on_its_way_fails() -> None:
    failure = BadFrameError("no")
    assert next_action(failure, "b", History()) == Retry()
    assert next_action(failure, "b", History(retries=MAX_RETRIES)) == RePrefill()
    assert next_action(failure, "b", History(retries=MAX_RETRIES, failures=(failure,))) == Fail(failure)


def test_without_anybody_to_ask_nobody_is_probed() -> None:
    assert next_action(LATE, None, History()) == Reroute(frozenset())


@pytest.mark.parametrize("failure", [MISS, GONE, LATE, BROKEN, LACKING, DrainingError("d")])
def test_whatever_fails_without_end_ends(failure: MeshnetError) -> None:
    history, steps = History(stateless=isinstance(failure, CacheMissError)), 0
    while not isinstance(next_action(failure, "b", history), Fail):
        history = History(failures=(*history.failures, failure), stateless=history.stateless)
        steps += 1
        assert steps <= MAX_ATTEMPTS


# -- the memory of blame ----------------------------------------------------------------------------------------------


def test_blame_lasts_longer_each_time_and_is_forgiven_and_forgotten() -> None:
    clock = ManualClock()
    memory = BlameMemory(clock)
    memory.blame("a")
    assert memory.excluded() == {"a"}
    clock.advance(BACKOFF_S)
    assert memory.excluded() == frozenset()
    memory.blame("a")
    clock.advance(2 * BACKOFF_S - 0.1)
    assert memory.excluded() == {"a"}
    memory.forgive("a")
    assert memory.excluded() == frozenset()
    for _ in range(12):
        memory.blame("a")
    clock.advance(MAX_BACKOFF_S - 1)
    assert memory.excluded() == {"a"}
    clock.advance(REMEMBERED_S)
    assert memory.excluded() == frozenset()
    assert len(memory) == 0


def test_blame_is_bounded() -> None:
    memory = BlameMemory(ManualClock())
    for index in range(MAX_NODES + 10):
        memory.blame(f"n{index}")
    assert len(memory) == MAX_NODES
    assert "n9" not in memory.excluded()
    assert f"n{MAX_NODES + 9}" in memory.excluded()


# -- frames of a replay -----------------------------------------------------------------------------------------------


def shape(frames: list[Frame]) -> list[tuple[str, int, int, int]]:
    return [(frame.phase.value, frame.position, frame.seq_len, frame.sample) for frame in frames]


def test_an_exact_replay_keeps_the_first_boundaries() -> None:
    make = EpochFrames("s-1", 1, 0, 1000, cache=True)
    prompt, answer = tuple(range(10)), (50, 51, 52)
    exact = list(make.prefill(prompt, answer, 4, Replay.EXACT))
    first = list(make.prefill(prompt, (), 4, Replay.EXACT))
    assert shape(exact) == [
        ("prefill", 0, 4, 0),
        ("prefill", 4, 4, 0),
        ("prefill", 8, 2, 0),
        ("decode", 10, 1, 0),
        ("decode", 11, 1, 0),
        ("decode", 12, 1, 1),
    ]
    assert shape(first) == [("prefill", 0, 4, 0), ("prefill", 4, 4, 0), ("prefill", 8, 2, 1)]
    assert [frame.body for frame in exact[:3]] == [frame.body for frame in first]
    assert shape(list(make.prefill(prompt, answer, 8, Replay.FAST))) == [("prefill", 0, 8, 0), ("prefill", 8, 5, 1)]


# -- carried out ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


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


async def test_a_hop_that_is_late_and_idle_is_blamed_for_a_while(llama: Path, expected: list[int]) -> None:
    clock = ManualClock()
    async with tiny_mesh(llama, ["0-1", "2-3", "2-3"], clock=clock) as mesh:
        engine = mesh.engine()
        route = await mesh.route(await mesh.model(MODEL), frozenset())
        blamed, other = route.hops[1].node_id, {"node-1", "node-2"} - {route.hops[1].node_id}
        async with late_once(mesh, route.hops[1].url, queued=0, at=21):
            ids, report = await run(engine)
        assert ids == expected
        assert report["epochs"] == 2
        assert engine.blame.excluded() == {blamed}
        assert [event["node"] for event in report["recoveries"]] == [blamed]  # type: ignore[attr-defined]
        _, later = await run(engine)
        assert {hop["node"] for hop in later["route"]} == {"node-0", *other}  # type: ignore[attr-defined]
        mesh.down.add(f"http://{other.pop()}")
        _, alone = await run(engine)
        assert blamed in {hop["node"] for hop in alone["route"]}  # type: ignore[attr-defined]
        assert engine.blame.excluded() == frozenset()  # it served an answer to its end


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
                gate.wait(5)
            return forward(works)

        async def probe(session: str | None) -> ProbeReply:
            gate.set()
            return ProbeReply(service.boot, None, 1)

        service.probe = probe  # type: ignore[method-assign]
        backend.forward = sometimes_slow  # type: ignore[method-assign]
        ids, report = await run(mesh.engine(step_deadline_s=0.5))
        assert ids == expected
        assert slow == [20]
        assert report["epochs"] == 1
        assert [event["action"] for event in report["recoveries"]] == ["Retry"]  # type: ignore[attr-defined]
        assert mesh.held_sessions == 0
