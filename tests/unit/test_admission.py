"""Room and admission: more generations than the nodes have room for, and nodes that keep nothing."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from admission_runs import COUNT, PROMPT, recoveries, run
from in_process_mesh import MODEL, add_node, random_prompt, reference_greedy, reference_model, tiny_mesh
from meshnet_core.errors import MissReason
from meshnet_core.frames import Frame
from meshnet_core.sampling import SamplingParams
from meshnet_gateway.generation import GenerationEngine, GenerationRequest
from meshnet_gateway.waiting_room import NoRoomError, WaitingRoom
from meshnet_node import hop_service
from meshnet_node.cache_store import SessionKey, StoreLimits
from meshnet_node.shard_work import ShardResult, ShardWork


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[int]:
    return reference_greedy(reference_model(llama), PROMPT, COUNT)


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
