"""Recovery as clients of the API see it, with the real model: streams that go on, errors that name the
missing layers, clients that leave, and a gateway that is told to stop.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from api_stream import Streamed, error_at_end, stream, whole
from node_fleet import GATEWAY, NodeFleet, node_fleet
from recovery_client import COUNT, LAYERS, PATIENT_S, QUESTION, SHORT_S, SLACK_S, TAILS, sessions, soon_empty
from smollm2 import gguf_path

pytestmark = [pytest.mark.real_model, pytest.mark.long, pytest.mark.timeout(1200)]

GREEDY = {"temperature": 0, "max_tokens": COUNT}
LONGER = GREEDY | {"max_tokens": 3 * COUNT}  # what is done to nodes at some token is done in mid-answer
LEAVERS, PREFILLING = 50, 10
STORY = "Tell a very long story of a lighthouse, in many chapters."
NEVER_ENDS = {"0": -100, "2": -100}  # <|endoftext|> and <|im_end|>
LONG_PROMPT = "Remember this: copper conducts, iron rusts, glass breaks. " * 170  # some 2,400 tokens, ten chunks


async def streamed(
    api: str, at_chunk: int, act: Callable[[], object], prompt: str = QUESTION, **fields: object
) -> list[str]:
    """The lines of one answer; ``act`` is done once that many of its documents are here."""
    lines: list[str] = []
    documents = 0
    async for line in stream(api, prompt, **fields):
        lines.append(line)
        documents += line.startswith("data: ")
        if line.startswith("data: ") and documents == at_chunk:
            done = act()
            if asyncio.iscoroutine(done):
                await done
    return lines


async def test_4_kills_under_a_stream_are_noticed_by_nobody(fleet: NodeFleet) -> None:
    chance = random.Random(4)
    api = await asyncio.to_thread(fleet.start_gateway, "--step-deadline", str(PATIENT_S))
    calm = Streamed.of([line async for line in stream(api, QUESTION, **LONGER)])
    assert (calm.finish, calm.report["epochs"]) == ("length", 1)
    for _ in range(4):
        moment, which = chance.randrange(1, COUNT - 4), chance.randrange(2)
        killed: list[str] = []

        async def kill(which: int = which, killed: list[str] = killed) -> None:
            killed.append([name for name, held in (await sessions(fleet)).items() if held][which])
            fleet.kill(killed[0])

        answer = Streamed.of(await streamed(api, moment + 1, kill, **LONGER))
        assert (answer.text, answer.finish) == (calm.text, calm.finish)
        assert answer.report["epochs"] >= 2
        await asyncio.to_thread(fleet.start_again, *killed)
        await soon_empty(fleet)


async def test_a_stream_that_nobody_can_go_on_with_ends_in_an_error_object(fleet: NodeFleet) -> None:
    api = await asyncio.to_thread(fleet.start_gateway, "--step-deadline", str(SHORT_S))
    killed_at: list[float] = []

    def kill() -> None:
        for name in TAILS:
            fleet.kill(name)
        killed_at.append(time.monotonic())

    lines = await streamed(api, 6, kill, **LONGER)
    assert time.monotonic() - killed_at[0] < SHORT_S + SLACK_S
    error = error_at_end(lines)
    assert (error["code"], error["type"]) == ("layers_unavailable", "server_error")
    assert "15-29" in error["message"]
    await soon_empty(fleet)


async def test_an_answer_in_one_piece_that_nobody_can_go_on_with_is_an_error_object(fleet: NodeFleet) -> None:
    api = await asyncio.to_thread(fleet.start_gateway, "--step-deadline", str(SHORT_S))
    asked = asyncio.create_task(whole(api, QUESTION, temperature=0, max_tokens=2000))
    while sum((await sessions(fleet)).values()) < 2:  # noqa: ASYNC110 - they are other processes
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.5)  # some tokens later; any moment will do
    assert not asked.done()
    for name in TAILS:
        fleet.kill(name)
    killed_at = time.monotonic()
    status, document = await asked
    assert time.monotonic() - killed_at < SHORT_S + SLACK_S
    assert status == 503
    assert (document["error"]["code"], document["error"]["type"]) == ("layers_unavailable", "server_error")
    assert "15-29" in document["error"]["message"]
    await soon_empty(fleet)


# -- clients that leave, and a gateway that does ----------------------------------------------------------------------


async def test_50_clients_that_leave_at_once_leave_nothing_behind(fleet: NodeFleet) -> None:
    """Ten of them while their prompts are read, which is under way on both halves when they go."""
    api = await asyncio.to_thread(fleet.start_gateway, "--step-deadline", "600")
    answering = [asyncio.Event() for _ in range(LEAVERS - PREFILLING)]
    prefilling, answered = [asyncio.Event() for _ in range(PREFILLING)], asyncio.Event()

    async def answer(index: int) -> None:
        async for line in stream(api, f"{QUESTION} ({index})", max_tokens=1000, logit_bias=NEVER_ENDS):
            if line.startswith("data: "):
                answering[index].set()

    async def prefill(index: int) -> None:
        async for line in stream(api, f"({index}) {LONG_PROMPT}", max_tokens=400):
            if line.startswith(": meshnet prefill"):
                prefilling[index].set()
            if line.startswith("data: "):
                answered.set()

    clients = [asyncio.create_task(answer(index)) for index in range(LEAVERS - PREFILLING)]
    await asyncio.gather(*(event.wait() for event in answering))
    clients += [asyncio.create_task(prefill(index)) for index in range(PREFILLING)]
    await asyncio.gather(*(event.wait() for event in prefilling))
    held = await sessions(fleet)
    assert sum(held.values()) >= 2 * LEAVERS - 4  # each on both hops, but for one that just moves
    assert not any(client.done() for client in clients)
    assert not answered.is_set()  # all ten are in mid-prefill
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    took = await soon_empty(fleet)
    print(f"{held} sessions before, none {took:.2f} s after")


async def test_a_gateway_that_is_told_to_stop_says_so_to_its_streams(fleet: NodeFleet) -> None:
    api = await asyncio.to_thread(fleet.start_gateway)
    lines = await streamed(api, 4, lambda: fleet.signal(GATEWAY, signal.SIGTERM), STORY, temperature=0, max_tokens=4000)
    error = error_at_end(lines)
    assert (error["code"], error["type"]) == ("gateway_stopping", "server_error")
    assert await asyncio.to_thread(fleet.ended, GATEWAY, 60) == 0
    await soon_empty(fleet)


# -- bfloat16 ---------------------------------------------------------------------------------------------------------


async def test_exact_recovery_in_bfloat16_gives_the_very_tokens_and_logprobs(tmp_path: Path) -> None:
    """With the option as people give it; the head is killed, then the tail, each twice."""
    gguf_path()
    wanted = {**LONGER, "logprobs": True, "top_logprobs": 0}
    with node_fleet(tmp_path, LAYERS, "bfloat16") as nodes:
        options = ("--recovery", "exact", "--step-deadline", str(PATIENT_S))
        api = await asyncio.to_thread(nodes.start_gateway, *options)
        calm = Streamed.of([line async for line in stream(api, QUESTION, **wanted)])
        assert (len(calm.tokens), calm.report["epochs"]) == (3 * COUNT, 1)
        assert {hop["dtype"] for hop in calm.report["route"]} == {"bfloat16+int4"}  # as its GGUF has the layers
        for half, moment in (("head", 5), ("tail", 11), ("head", 17), ("tail", 19)):
            killed: list[str] = []

            async def kill(half: str = half, killed: list[str] = killed) -> None:
                killed.extend(name for name, held in (await sessions(nodes)).items() if held and half in name)
                nodes.kill(killed[0])

            answer = Streamed.of(await streamed(api, moment + 1, kill, **wanted))
            assert answer.tokens == calm.tokens, (half, moment)
            assert (answer.text, answer.finish) == (calm.text, calm.finish)
            assert answer.report["epochs"] >= 2
            assert killed[0] in {event.get("node") for event in answer.report["recoveries"]}
            await asyncio.to_thread(nodes.start_again, *killed)
