"""Recovery between real processes, with the real model: nodes are killed, hung, restarted and cut off in mid-answer.

Greedy; the answer is the undisturbed one, whatever happens.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from meshnet_core.clock import SystemClock
from meshnet_core.errors import LayersUnavailableError
from meshnet_core.http_transport import HttpTransport
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_core.tracker_client import TrackerClient
from meshnet_gateway.generation import Generation, GenerationEngine, GenerationRequest
from meshnet_gateway.mesh import Mesh
from meshnet_gateway.recovery import Replay
from node_fleet import NodeFleet, RoutesOver, node_fleet
from process_mesh import fetch_json
from smollm2 import gguf_path, reference_tokenizer
from tcp_relay import tcp_relay

pytestmark = [pytest.mark.real_model, pytest.mark.long, pytest.mark.timeout(1200)]

HEADS, TAILS = ("head-a", "head-b"), ("tail-a", "tail-b")
LAYERS = {**dict.fromkeys(HEADS, "0-14"), **dict.fromkeys(TAILS, "15-29")}
QUESTION = "Why is the sky blue?"
COUNT = 24
PATIENT_S, SHORT_S = 20.0, 4.0  # step deadlines: longer than any step of a busy machine, and worth sitting out


@cache
def prompt_of(text: str) -> tuple[int, ...]:
    rendered = reference_tokenizer().apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return tuple(reference_tokenizer()(rendered, add_special_tokens=False)["input_ids"])


@dataclass
class Answer:
    ids: list[int]
    report: dict[str, Any]

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        return list(self.report["recoveries"])

    @property
    def nodes(self) -> list[str]:
        return [hop["node"] for hop in self.report["route"]]


During = Callable[[Generation, int], Awaitable[None]]


@dataclass
class Client:
    """Runs generations over the nodes of a fleet, below the level of text."""

    routes: RoutesOver
    transport: HttpTransport
    recovery: Replay = Replay.FAST

    async def answer(
        self, *, deadline_s: float = PATIENT_S, during: During | None = None, names: Sequence[str] = ()
    ) -> Answer:
        """One greedy answer; ``during(generation, tokens so far)`` runs after each token.

        Each is made by an engine of its own, so that nobody is blamed for what an earlier test did.
        """
        if names:
            self.routes.names = set(names)
        engine = GenerationEngine(
            self.routes, self.transport, SystemClock(), step_deadline_s=deadline_s, recovery=self.recovery
        )
        (model,) = await self.routes.mesh.models()
        generation = engine.start(GenerationRequest(model.name, prompt_of(QUESTION), COUNT, SamplingParams()))
        ids: list[int] = []
        try:
            async for event in generation:
                if isinstance(event, SampledToken):
                    ids.append(event.id)
                    if during is not None:
                        await during(generation, len(ids))
        finally:
            await generation.aclose()
        return Answer(ids, generation.report())


@asynccontextmanager
async def client_of(fleet: NodeFleet, recovery: Replay = Replay.FAST) -> AsyncIterator[Client]:
    clock = SystemClock()
    tracker, transport = TrackerClient(fleet.tracker_url), HttpTransport(clock)
    mesh = Mesh(tracker, clock)
    try:
        yield Client(RoutesOver(mesh, set(LAYERS)), transport, recovery)
    finally:
        await mesh.close()
        await transport.close()
        await tracker.close()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeFleet]:
    """Two nodes for each half, so that any of them may go."""
    gguf_path()
    with node_fleet(tmp_path_factory.mktemp("fleet"), LAYERS) as nodes:
        yield nodes


_undisturbed: dict[str, list[int]] = {}


async def undisturbed(client: Client, dtype: str = "float32") -> list[int]:
    """The answer when nothing happens."""
    if dtype not in _undisturbed:
        answer = await client.answer()
        assert answer.recoveries == []
        _undisturbed[dtype] = answer.ids
    return _undisturbed[dtype]


async def sessions(fleet: NodeFleet) -> dict[str, int]:
    """How many sessions each node that is alive holds."""
    alive = [name for name in fleet.layers if fleet.alive(name)]
    told = await asyncio.gather(*(fetch_json(f"{fleet.url(name)}/healthz") for name in alive))
    return {name: int(node["sessions"]) for name, node in zip(alive, told, strict=True)}


async def soon_empty(fleet: NodeFleet, seconds: float = 2.0) -> float:
    """Wait until no node holds a session; how long it took."""
    began = time.monotonic()
    while any((await sessions(fleet)).values()):
        assert time.monotonic() - began < seconds, f"still held after {seconds:g} s: {await sessions(fleet)}"
        await asyncio.sleep(0.05)
    return time.monotonic() - began


async def whole_again(fleet: NodeFleet, *names: str) -> None:
    """Start nodes again and wait until they serve."""
    for name in names:
        if not fleet.alive(name):
            fleet.start(name)
    await asyncio.to_thread(fleet.wait_ready, *names)


def at_token(moment: int, act: Callable[[Generation], Awaitable[object]]) -> During:
    async def during(generation: Generation, made: int) -> None:
        if made == moment:
            await act(generation)

    return during


# -- deaths -----------------------------------------------------------------------------------------------------------


async def test_16_kills_at_random_moments_change_no_token(fleet: NodeFleet) -> None:
    """One node of the route in use is killed, at any time from the open to the last step; 4 more go through the API."""
    chance = random.Random(20)
    disturbed = 0
    async with client_of(fleet) as client:
        expected = await undisturbed(client)
        began = time.monotonic()
        await client.answer()
        duration = time.monotonic() - began
        for round_ in range(16):
            at, which = 0.9 * chance.random() * duration, chance.randrange(2)
            killed: list[str] = []

            async def kill(at: float = at, which: int = which, killed: list[str] = killed) -> None:
                await asyncio.sleep(at)
                in_use = [name for name in LAYERS if (await sessions(fleet))[name]]
                if in_use:
                    killed.append(in_use[which % len(in_use)])
                    fleet.kill(killed[0])

            killing = asyncio.create_task(kill())
            answer = await client.answer()
            await killing
            assert answer.ids == expected, (round_, at, killed, answer.recoveries)
            disturbed += len(answer.recoveries) > 0
            await whole_again(fleet, *killed)
            await soon_empty(fleet)
    assert disturbed >= 12


async def stream(api: str, prompt: str, **fields: object) -> AsyncIterator[str]:
    """The lines of a streamed chat answer."""
    body = {"model": await model_name(api), "messages": [{"role": "user", "content": prompt}], "stream": True, **fields}
    async with aiohttp.ClientSession() as http, http.post(f"{api}/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.strip():
                yield line.decode().strip()


async def model_name(api: str) -> str:
    return str((await fetch_json(f"{api}/models"))["data"][0]["id"])


def read(lines: Sequence[str]) -> tuple[str, str | None, dict[str, Any]]:
    """Text, finish reason and report of a stream that ended normally."""
    assert lines[-1] == "data: [DONE]", lines[-2:]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1] if line.startswith("data: ")]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    return text, chunks[-1]["choices"][0]["finish_reason"], chunks[-1]["meshnet"]


async def test_4_kills_under_a_stream_of_the_api_are_noticed_by_nobody(fleet: NodeFleet) -> None:
    chance = random.Random(4)
    api = await asyncio.to_thread(fleet.start_gateway, "--step-deadline", str(PATIENT_S))
    fields = {"temperature": 0, "max_tokens": COUNT}
    calm = read([line async for line in stream(api, QUESTION, **fields)])
    assert (calm[1], calm[2]["epochs"]) == ("length", 1)
    for _ in range(4):
        moment, which = chance.randrange(1, COUNT - 4), chance.randrange(2)
        lines: list[str] = []
        killed: list[str] = []
        async for line in stream(api, QUESTION, **fields):
            lines.append(line)
            if sum(line.startswith("data: ") for line in lines) == moment + 1 and not killed:
                killed = [name for name, held in (await sessions(fleet)).items() if held][which : which + 1]
                fleet.kill(killed[0])
        text, finish, report = read(lines)
        assert (text, finish) == calm[:2]
        assert report["epochs"] >= 2
        await whole_again(fleet, *killed)
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
    await soon_empty(fleet, 10.0)  # what was said to it while it hung, it hears now


async def test_dropped_connections_cost_a_retry_and_no_prefill(fleet: NodeFleet) -> None:
    chance = random.Random(3)
    async with client_of(fleet) as client:
        expected = await undisturbed(client)
        async with tcp_relay(fleet.ports["head-a"]) as to_head, tcp_relay(fleet.ports["tail-a"]) as to_tail:
            client.routes.at = {"head-a": to_head.url, "tail-a": to_tail.url}
            done = asyncio.Event()
            cuts: list[int] = []

            async def cut() -> None:
                while not done.is_set():
                    await asyncio.sleep(0.2 + 0.4 * chance.random())
                    cuts.append(chance.choice((to_head, to_tail)).cut())

            cutting = asyncio.create_task(cut())
            try:
                answer = await client.answer(names=("head-a", "tail-a"))
            finally:
                done.set()
                await cutting
            assert answer.ids == expected
            assert answer.report["epochs"] == 1
            assert {event["action"] for event in answer.recoveries} <= {"Retry"}
            assert sum(cuts[:-1]) >= 3
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
    fleet.kill("wide")
    del fleet.layers["wide"]
    await whole_again(fleet, "tail-a")


async def test_with_nobody_covering_the_missing_layers_are_named_in_time(fleet: NodeFleet) -> None:
    async def kill(_: Generation) -> None:
        fleet.kill("tail-a")

    async with client_of(fleet) as client:
        began: list[float] = []

        async def kill_and_note(generation: Generation) -> None:
            await kill(generation)
            began.append(time.monotonic())

        with pytest.raises(LayersUnavailableError, match="15-29"):
            await client.answer(deadline_s=SHORT_S, during=at_token(7, kill_and_note), names=("head-a", "tail-a"))
        assert time.monotonic() - began[0] < SHORT_S + 1.0
        assert (await sessions(fleet))["head-a"] == 0
    await whole_again(fleet, "tail-a")


async def test_a_stream_that_nobody_can_go_on_with_ends_in_an_error_object(fleet: NodeFleet) -> None:
    api = await asyncio.to_thread(fleet.start_gateway, "--step-deadline", str(SHORT_S))
    lines: list[str] = []
    killed_at = 0.0
    async for line in stream(api, QUESTION, temperature=0, max_tokens=COUNT):
        lines.append(line)
        if sum(line.startswith("data: ") for line in lines) == 6 and not killed_at:
            fleet.kill("tail-a")
            fleet.kill("tail-b")
            killed_at = time.monotonic()
    assert time.monotonic() - killed_at < SHORT_S + 1.0
    assert lines[-1] == "data: [DONE]"
    error = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == ("layers_unavailable", "server_error")
    assert "15-29" in error["message"]
    await soon_empty(fleet)
    await whole_again(fleet, *TAILS)


# -- clients that leave -----------------------------------------------------------------------------------------------


async def test_50_clients_that_leave_at_once_leave_nothing_behind(fleet: NodeFleet) -> None:
    api = await asyncio.to_thread(fleet.start_gateway)
    long_prompt = "Remember this: copper conducts, iron rusts, glass breaks. " * 60
    under_way = [asyncio.Event() for _ in range(50)]

    async def one(index: int) -> None:
        prefilling = index >= 40
        async for line in stream(api, long_prompt if prefilling else f"{QUESTION} ({index})", max_tokens=400):
            if line.startswith(": meshnet prefill" if prefilling else "data: "):
                under_way[index].set()

    answering = [asyncio.create_task(one(index)) for index in range(40)]
    await asyncio.gather(*(event.wait() for event in under_way[:40]))
    prefilling = [asyncio.create_task(one(index)) for index in range(40, 50)]
    await under_way[49].wait()
    clients = answering + prefilling
    assert not any(client.done() for client in clients)
    held = await sessions(fleet)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    took = await soon_empty(fleet)
    print(f"{held} sessions before, none {took:.2f} s after")
    assert sum(held.values()) >= 50


# -- bfloat16 ---------------------------------------------------------------------------------------------------------


async def test_exact_recovery_in_bfloat16_gives_the_very_tokens(tmp_path: Path) -> None:
    gguf_path()
    with node_fleet(tmp_path, {"head-a": "0-14", "tail-a": "15-29", "tail-b": "15-29"}, "bfloat16") as nodes:
        async with client_of(nodes, Replay.EXACT) as client:
            expected = await undisturbed(client, "bfloat16")
            for moment in (5, 17):
                killed: list[str] = []

                async def kill(_: Generation, killed: list[str] = killed) -> None:
                    killed.extend(name for name, held in (await sessions(nodes)).items() if held and "tail" in name)
                    nodes.kill(killed[0])

                answer = await client.answer(during=at_token(moment, kill))
                assert answer.ids == expected
                assert answer.report["epochs"] == 2
                await whole_again(nodes, *killed)
