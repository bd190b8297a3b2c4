"""Nodes that leave in mid-answer: sessions move, or end where they are."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from admission_runs import COUNT, PROMPT, recoveries, run
from in_process_mesh import add_node, reference_greedy, reference_model, tiny_mesh
from meshnet_core.clock import ManualClock
from meshnet_core.errors import CacheFullError, LayersUnavailableError, MissReason
from meshnet_core.open_document import OpenDocument, OpenReply
from meshnet_gateway import place
from meshnet_node.cache_store import SessionKey, StoreLimits


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[int]:
    return reference_greedy(reference_model(llama), PROMPT, COUNT)


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
