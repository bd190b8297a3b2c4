"""JSON answers and forced tool calls of the real 135M model, over real nodes, some of which die in mid-answer.

Every answer is drawn with a seed of its own. One whose tail dies must be whole and valid, and the very one that it
would have been.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import jsonschema_rs
import openai
import pytest

from node_fleet import NodeFleet, node_fleet
from process_mesh import fetch_json

pytestmark = [pytest.mark.real_model, pytest.mark.long, pytest.mark.timeout(2400)]

LAYERS = {"head": "0-14", "tail-a": "15-29", "tail-b": "15-29"}
MODEL = "SmolLM2-135M-Instruct"
COUNT, TOGETHER = 50, 10
DEATHS = (0, 2)  # batches in which a tail dies

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["happy", "sad", "sleepy"]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    {
        "type": "object",
        "properties": {
            "title": {"type": "string", "maxLength": 20},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 3},
            "author": {"$ref": "#/$defs/person"},
        },
        "required": ["title", "tags", "author"],
        "$defs": {"person": PERSON},
    },
    {
        "type": "object",
        "properties": {
            "shape": {"anyOf": [
                {"type": "object", "properties": {"kind": {"const": "circle"}, "radius": DIGIT},
                 "required": ["kind", "radius"]},
                {"type": "object", "properties": {"kind": {"const": "square"}, "side": DIGIT},
                 "required": ["kind", "side"]},
            ]},
            "visible": {"type": "boolean"},
            "note": {"type": ["string", "null"], "maxLength": 12},
        },
        "required": ["shape", "visible", "note"],
    },
    {
        "type": "object",
        "properties": {
            "day": {"type": "string", "format": "date"},
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            "grid": {"type": "array", "minItems": 2, "maxItems": 2, "items": {
                "type": "array", "minItems": 2, "maxItems": 2, "items": DIGIT}},
        },
        "required": ["day", "code", "grid"],
    },
]  # fmt: skip
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "remember", "description": "Keeps a person.", "parameters": PERSON}},
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 20},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
            },
        },
    },
]
BY_NAME = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
TOPICS = ("a baker", "a river", "the sea", "Rome in March", "an old dog")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NodeFleet, str]]:
    with node_fleet(tmp_path_factory.mktemp("fleet"), LAYERS) as nodes:
        yield nodes, nodes.start_gateway("--step-deadline", "60")


@asynccontextmanager
async def client_at(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(api_key="none", base_url=url, max_retries=0, timeout=600) as client:
        yield client


def question(at: int) -> list[Any]:
    return [{"role": "user", "content": f"Tell me about {TOPICS[at % len(TOPICS)]}, number {at}."}]


def schema_fields(at: int) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMAS[at % len(SCHEMAS)]}}
    return {"messages": question(at), "response_format": form}


def tool_fields(at: int) -> dict[str, Any]:
    choice = "required" if at % 2 else {"type": "function", "function": {"name": "weather"}}
    return {"messages": question(at), "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}


def check_schema(at: int, choice: Any) -> None:
    assert choice.finish_reason == "stop"
    jsonschema_rs.validate(SCHEMAS[at % len(SCHEMAS)], json.loads(choice.message.content))


def check_tool(at: int, choice: Any) -> None:
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert at % 2 or call.function.name == "weather"
    jsonschema_rs.validate(BY_NAME[call.function.name], json.loads(call.function.arguments))


async def ask(client: openai.AsyncOpenAI, at: int, fields: dict[str, Any]) -> Any:
    return await client.chat.completions.create(model=MODEL, seed=at, temperature=0.8, max_tokens=400, **fields)


async def busy_tail(nodes: NodeFleet, tasks: Sequence[asyncio.Task[Any]]) -> str:
    """A tail that runs several sessions which have made some tokens; fails where the answers are over before."""
    while not all(task.done() for task in tasks):
        for name in ("tail-a", "tail-b"):
            if nodes.alive(name):
                status = await fetch_json(f"{nodes.url(name)}/healthz")
                going = [s for s in status["running"] if steps_of(s) >= 5]
                if len(going) >= 2:
                    return name
        await asyncio.sleep(0.05)
    raise AssertionError([task.exception() for task in tasks])


def steps_of(session: dict[str, Any]) -> int:
    """How many steps a session has run, with drafts or without."""
    return int(session["frames"].get("decode", 0)) + int(session["frames"].get("verify", 0))


async def batch(
    nodes: NodeFleet, client: openai.AsyncOpenAI, asked: Sequence[tuple[int, dict[str, Any]]], kill: bool
) -> list[Any]:
    """Answers to all of ``asked`` at once; with ``kill`` the busier tail dies under them, and comes back after."""
    tasks = [asyncio.create_task(ask(client, at, fields)) for at, fields in asked]
    if not kill:
        return await asyncio.gather(*tasks)
    victim = await busy_tail(nodes, tasks)
    nodes.kill(victim)
    answers = await asyncio.gather(*tasks)
    nodes.start(victim)
    await asyncio.to_thread(nodes.wait_ready, victim)
    return answers


@pytest.mark.parametrize(("fields", "check"), [(schema_fields, check_schema), (tool_fields, check_tool)])
async def test_fifty_of_fifty_are_valid_though_nodes_die(fleet: tuple[NodeFleet, str], fields: Any, check: Any) -> None:
    nodes, url = fleet
    recovered = 0
    async with client_at(url) as client:
        for number, start in enumerate(range(0, COUNT, TOGETHER)):
            asked = [(at, fields(at)) for at in range(start, start + TOGETHER)]
            answers = await batch(nodes, client, asked, kill=number in DEATHS)
            for (at, _), answer in zip(asked, answers, strict=True):
                check(at, answer.choices[0])
            hit = [
                at
                for (at, _), answer in zip(asked, answers, strict=True)
                if answer.model_extra["meshnet"]["recoveries"]
            ]
            recovered += len(hit)
            for at in hit[:3]:  # undisturbed they are the same, in fp32
                again = await ask(client, at, fields(at))
                assert not again.model_extra["meshnet"]["recoveries"]
                before = answers[at - start].choices[0].message
                after = again.choices[0].message
                assert after.content == before.content
                assert [c.function for c in after.tool_calls or ()] == [c.function for c in before.tool_calls or ()]
    assert recovered >= len(DEATHS)


async def test_an_answer_that_is_cut_is_never_passed_off_as_whole(fleet: tuple[NodeFleet, str]) -> None:
    _, url = fleet
    async with client_at(url) as client:
        for at, fields in ((1, schema_fields(1)), (1, tool_fields(1))):
            answer = await client.chat.completions.create(model=MODEL, seed=at, max_tokens=5, **fields)
            assert answer.choices[0].finish_reason == "length"
            assert not answer.choices[0].message.tool_calls
            assert answer.choices[0].message.content
