"""Who is blamed for what went wrong, and who is not: on an in-process mesh whose nodes are late, gone or cut off."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from in_process_mesh import (
    MODEL,
    reference_greedy,
    reference_model,
    tiny_mesh,
)
from meshnet_core.clock import ManualClock
from meshnet_core.coverage import ModelSummary
from meshnet_core.demand import Demand
from meshnet_core.errors import (
    HopUnreachableError,
)
from meshnet_core.frames import Frame, FrameReply
from meshnet_core.open_document import OpenDocument, OpenReply, ProbeReply
from meshnet_core.planning import plan_route
from meshnet_core.route import Route
from meshnet_node.shard_work import ShardResult, ShardWork
from recovery_runs import COUNT, PROMPT, late_once, run


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[int]:
    return reference_greedy(reference_model(llama), PROMPT, COUNT)


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
