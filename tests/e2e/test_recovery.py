"""Recovery between real processes, with the real model: nodes killed, hung, drained, restarted, cut off, short of room.

Greedy; the answer is the undisturbed one, whatever happens.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time

import pytest

from drafters import KnowingDrafter, counted, now_and_then
from meshnet_core.errors import LayersUnavailableError
from meshnet_gateway.generation import Generation
from meshnet_gateway.speculation import Speculate
from meshnet_node.growing_cache import rows_for
from node_fleet import NodeFleet
from recovery_client import (
    COUNT,
    HEADS,
    LAYERS,
    QUESTION,
    SHORT_S,
    SLACK_S,
    TAILS,
    Answer,
    at_token,
    client_of,
    prompt_of,
    sessions,
    soon_empty,
    undisturbed,
)
from tcp_relay import tcp_relay

pytestmark = [pytest.mark.real_model, pytest.mark.long, pytest.mark.timeout(1200)]

KILLS = 16
GROWTH_QUANTUM = 256  # positions that an open sets aside beyond its prefill
# Of one position at the tail, float32: keys and values of fifteen layers, three heads of 64; hidden states coming in.
ROW_BYTES, HIDDEN_BYTES = 15 * 2 * 3 * 64 * 4, 576 * 4


# -- deaths -----------------------------------------------------------------------------------------------------------


async def test_16_kills_at_random_moments_change_no_token(fleet: NodeFleet) -> None:
    """One node of the route in use is killed, at any time from the open to the last step; 4 more go through the API."""
    chance = random.Random(20)
    disturbed = 0
    async with client_of(fleet) as client:
        expected = await undisturbed(client)
        duration, tries = 1.0, 0
        while disturbed < KILLS:
            tries += 1
            assert tries <= 3 * KILLS, f"{disturbed} of {tries - 1} answers were disturbed"
            at, which = 0.9 * chance.random() * duration, chance.randrange(2)
            killed: list[str] = []

            async def kill(at: float = at, which: int = which, killed: list[str] = killed) -> None:
                await asyncio.sleep(at)
                in_use = [name for name in LAYERS if (await sessions(fleet))[name]]
                if in_use:
                    killed.append(in_use[which % len(in_use)])
                    fleet.kill(killed[0])

            began, killing = time.monotonic(), asyncio.create_task(kill())
            answer = await client.answer()
            took = time.monotonic() - began
            await killing
            assert answer.ids == expected, (tries, at, killed, answer.recoveries)
            if answer.recoveries:
                disturbed += 1
            else:  # what was to disturb it came too late
                duration = took
            await asyncio.to_thread(fleet.start_again, *killed)
            await soon_empty(fleet)


async def test_nodes_killed_while_drafts_are_checked_change_no_token(fleet: NodeFleet) -> None:
    async with client_of(fleet) as client:
        expected = await undisturbed(client)
        text = [*prompt_of(QUESTION), *expected]
        engine = client.engine()
        engine.speculate = Speculate(4, always=True)
        engine.drafter = lambda: KnowingDrafter([text], now_and_then, counted)
        for at, which in ((3, 0), (5, 1), (8, 0), (12, 1)):
            killed: list[str] = []

            async def kill(_: Generation, which: int = which, killed: list[str] = killed) -> None:
                held = await sessions(fleet)
                killed.append([name for name in LAYERS if held[name]][which])
                fleet.kill(killed[0])

            answer = await client.answer(engine=engine, during=at_token(at, kill))
            assert answer.ids == expected, (at, killed, answer.recoveries)
            assert answer.report["epochs"] >= 2
            assert answer.report["drafted_tokens"] > answer.report["accepted_tokens"] > 0
            await asyncio.to_thread(fleet.start_again, *killed)
            await soon_empty(fleet)


async def test_a_node_that_restarts_on_its_port_goes_on_with_the_answer(fleet: NodeFleet) -> None:
    async def restart(_: Generation) -> None:
        fleet.kill("tail-a")
        fleet.start("tail-a")

    async with client_of(fleet) as client:
        expected = await undisturbed(client)
        answer = await client.answer(deadline_s=60.0, during=at_token(9, restart), names=("head-a", "tail-a"))
        assert answer.ids == expected
        assert answer.report["epochs"] >= 2
        assert answer.nodes == ["head-a", "tail-a"]
    await asyncio.to_thread(fleet.wait_ready, "tail-a")
    await soon_empty(fleet)


# -- lost state, hangs, broken connections ----------------------------------------------------------------------------


async def test_a_session_that_a_node_dropped_is_prefilled_again(fleet: NodeFleet) -> None:
    async with client_of(fleet) as client:
        expected = await undisturbed(client)
        for victim in ("head-a", "tail-a"):

            async def drop(generation: Generation, victim: str = victim) -> None:
                freed = await client.transport.release(fleet.url(victim), generation.session, through_epoch=0)
                assert freed == 1

            answer = await client.answer(during=at_token(11, drop), names=("head-a", "tail-a"))
            assert answer.ids == expected
            assert answer.report["epochs"] == 2
            (event,) = answer.recoveries
            assert (event["error"], event["action"], event["node"]) == ("cache_miss", "RePrefill", victim)
    await soon_empty(fleet)


def tail_bytes(positions: int) -> int:
    """What a tail sets aside for a session of so many positions."""
    return rows_for(positions) * ROW_BYTES + positions * HIDDEN_BYTES


async def test_a_session_that_gives_way_to_another_is_prefilled_again_once_there_is_room(fleet: NodeFleet) -> None:
    """Two sessions fit a tail as they open; when the older one outgrows what was set aside for it, the younger goes."""
    prompt = len(prompt_of(QUESTION))
    older_count = GROWTH_QUANTUM + 40
    room = tail_bytes(prompt + GROWTH_QUANTUM) + tail_bytes(prompt + COUNT) + 2 * (ROW_BYTES + HIDDEN_BYTES)
    await asyncio.to_thread(fleet.start, "narrow", "15-29", "--cache-bytes", str(room))
    await asyncio.to_thread(fleet.wait_ready, "narrow")
    async with client_of(fleet) as client:
        expected = await undisturbed(client)
        route, engine = ("head-a", "narrow"), client.engine()  # of one gateway, which has one waiting room
        younger: list[asyncio.Task[Answer]] = []

        async def ask_too(_: Generation) -> None:
            younger.append(asyncio.create_task(client.answer(engine=engine)))

        older = await client.answer(
            engine=engine, names=route, count=older_count, during=at_token(GROWTH_QUANTUM - 5, ask_too)
        )
        answer = await younger[0]
        assert (older.ids[:COUNT], older.report["epochs"]) == (expected, 1), older.recoveries
        assert answer.ids == expected
        assert answer.report["epochs"] == 2
        (event,) = answer.recoveries
        assert (event["error"], event["reason"], event["node"]) == ("cache_miss", "evicted", "narrow")
        assert 1 <= event["after_tokens"] < COUNT
        assert answer.nodes == ["head-a", "narrow"]
    await soon_empty(fleet)


@pytest.mark.parametrize("half", [0, 1], ids=["the head", "the tail"])
async def test_a_node_that_is_told_to_stop_hands_its_session_over(fleet: NodeFleet, half: int) -> None:
    leaving = (HEADS, TAILS)[half][0]
    others = {"head-a", "tail-a"} | {(HEADS, TAILS)[half][1]}
    async with client_of(fleet) as client:
        expected = await undisturbed(client)

        async def drain(_: Generation) -> None:
            client.routes.names = others
            fleet.signal(leaving, signal.SIGTERM)

        answer = await client.answer(during=at_token(6, drain), names=("head-a", "tail-a"))
        assert answer.ids == expected
        assert answer.report["epochs"] == 2
        (event,) = answer.recoveries
        assert (event["error"], event["action"], event["node"]) == ("draining", "Reroute", leaving)
        assert 6 <= event["after_tokens"] < COUNT
        assert leaving not in answer.nodes
    assert await asyncio.to_thread(fleet.ended, leaving, 60) == 0
    await soon_empty(fleet)


@pytest.mark.parametrize("half", [0, 1], ids=["the head", "the tail"])
async def test_of_two_hops_the_one_that_hangs_is_blamed(fleet: NodeFleet, half: int) -> None:
    hung = (HEADS, TAILS)[half][0]
    others = {"head-a", "tail-a"} | {(HEADS, TAILS)[half][1]}
    async with client_of(fleet) as client:
        expected = await undisturbed(client)

        async def hang(_: Generation) -> None:
            client.routes.names = others  # whoever covers comes in when it is needed
            fleet.signal(hung, signal.SIGSTOP)

        began = time.monotonic()
        try:
            answer = await client.answer(deadline_s=SHORT_S, during=at_token(8, hang), names=("head-a", "tail-a"))
        finally:
            fleet.signal(hung, signal.SIGCONT)
        assert answer.ids == expected
        assert {event["node"] for event in answer.recoveries} == {hung}
        assert [event["action"] for event in answer.recoveries] == ["Reroute"]
        assert answer.report["epochs"] == 2
        assert hung not in answer.nodes
        assert time.monotonic() - began < 10 * SHORT_S
    await soon_empty(fleet)  # what was said to it while it hung, it hears now


async def test_dropped_connections_cost_a_retry_and_no_prefill(fleet: NodeFleet) -> None:
    chance = random.Random(3)
    async with client_of(fleet) as client:
        expected = await undisturbed(client)
        async with tcp_relay(fleet.ports["head-a"]) as to_head, tcp_relay(fleet.ports["tail-a"]) as to_tail:
            client.routes.at = {"head-a": to_head.url, "tail-a": to_tail.url}
            cuts: list[int] = []

            async def cut(_: Generation, made: int) -> None:
                """After every third token: between two steps, or somewhere in the next one."""
                if made % 3 == 0:
                    relay, loop = (to_head, to_tail)[made // 3 % 2], asyncio.get_running_loop()
                    loop.call_later(chance.choice((0.0, 0.03 * chance.random())), lambda: cuts.append(relay.cut()))

            answer = await client.answer(during=cut, names=("head-a", "tail-a"))
            assert answer.ids == expected
            assert answer.report["epochs"] == 1
            assert {event["action"] for event in answer.recoveries} <= {"Retry"}
            assert sum(cuts) >= 3
            assert to_head.connections + to_tail.connections > 3
    await soon_empty(fleet)


async def test_a_route_change_to_other_boundaries_changes_no_token(fleet: NodeFleet) -> None:
    """From 0-14 | 15-29 to 0-14 | 15-29 inside 10-29: an effective start, on a node that never saw the session."""
    fleet.start("wide", "10-29")
    await asyncio.to_thread(fleet.wait_ready, "wide")
    async with client_of(fleet) as client:
        expected = await undisturbed(client)

        async def kill(_: Generation) -> None:
            client.routes.names = {"head-a", "tail-a", "wide"}
            fleet.kill("tail-a")

        answer = await client.answer(during=at_token(10, kill), names=("head-a", "tail-a"))
        assert answer.ids == expected
        assert answer.nodes == ["head-a", "wide"]
        assert answer.report["epochs"] == 2
        assert (await sessions(fleet))["head-a"] == 0


async def test_with_nobody_covering_the_missing_layers_are_named_in_time(fleet: NodeFleet) -> None:
    killed_at: list[float] = []

    async def kill(_: Generation) -> None:
        fleet.kill("tail-a")
        killed_at.append(time.monotonic())

    async with client_of(fleet) as client:
        with pytest.raises(LayersUnavailableError, match="15-29"):
            await client.answer(deadline_s=SHORT_S, during=at_token(7, kill), names=("head-a", "tail-a"))
        assert time.monotonic() - killed_at[0] < SHORT_S + SLACK_S
        assert (await sessions(fleet))["head-a"] == 0
