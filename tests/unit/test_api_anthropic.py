"""Anthropic's messages endpoint over a scripted engine: the same answers in other words."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import ANY

import pytest

from api_client import app_of, client_of, post
from meshnet_core.clock import ManualClock
from meshnet_core.doorkeeper import Doorkeeper
from meshnet_core.errors import DeadlineError
from meshnet_gateway.api_keys import ApiKeys
from meshnet_gateway.generation import PrefillProgress
from meshnet_gateway.text_model import TextModel
from scripted_engine import ScriptedEngine, tokens
from tiny_tokenizers import byte_level_files

PATH = "/v1/messages"
USER = [{"role": "user", "content": "hello"}]
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


@pytest.fixture(scope="module")
def model() -> TextModel:
    files = byte_level_files()
    files["config.json"] = json.dumps({**json.loads(files["config.json"]), "max_position_embeddings": 4096}).encode()
    return TextModel.from_files("tiny", "f" * 64, files)


def saying(model: TextModel, text: str, **more: Any) -> ScriptedEngine:
    return ScriptedEngine([PrefillProgress(5, 5), *tokens(model.encode(text))], **more)


async def ask(engine: ScriptedEngine, model: TextModel, **body: Any) -> Any:
    return (await post(app_of(engine, model), PATH, **{"max_tokens": 500, "messages": USER, **body})).json()


async def streamed(engine: ScriptedEngine, model: TextModel, **body: Any) -> list[dict[str, Any]]:
    """The events, whose names are their types."""
    body = {"max_tokens": 500, "messages": USER, "stream": True, **body}
    response = await post(app_of(engine, model), PATH, **body)
    events = []
    for block in response.text.split("\n\n")[:-1]:
        if block.startswith("event: "):
            name, _, data = block.removeprefix("event: ").partition("\ndata: ")
            events.append(json.loads(data))
            assert events[-1]["type"] == name
        else:
            assert block.startswith(": ")
    return events


async def test_a_whole_answer(model: TextModel) -> None:
    engine = saying(model, "The fox 你好")
    answer = await ask(engine, model, system="Be brief.", temperature=0.5, top_k=3, metadata={"user_id": "someone"})
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
    assert answer["content"] == [{"type": "text", "text": "The fox 你好"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    (request,) = engine.requests
    assert answer["usage"]["input_tokens"] == len(request.prompt_ids)
    assert answer["usage"]["output_tokens"] == len(model.encode("The fox 你好"))
    assert (request.sampling.temperature, request.sampling.top_k, request.max_tokens) == (0.5, 3, 500)
    assert model.decode(request.prompt_ids).startswith("system\nBe brief.")
    assert engine.closed == ["s-1"]


async def test_a_stream_builds_the_same(model: TextModel) -> None:
    events = await streamed(saying(model, f"Let me see.\n{CALL}"), model, tools=[TOOL])
    whole = await ask(saying(model, f"Let me see.\n{CALL}"), model, tools=[TOOL])
    assert events[0]["type"] == "message_start"
    assert events[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[event["index"]]["text"] = blocks[event["index"]].get("text", "") + delta.get("text", "")
            blocks[event["index"]]["json"] += delta.get("partial_json", "")
    assert [(block["type"], block["text"]) for block in blocks] == [("text", "Let me see."), ("tool_use", "")]
    assert json.loads(blocks[1]["json"]) == whole["content"][1]["input"] == {"city": "Ulm"}
    assert [event["type"] for event in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert sum(event["type"] == "content_block_stop" for event in events) == 2
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


async def test_an_empty_answer_and_one_that_is_cut(model: TextModel) -> None:
    empty = await ask(ScriptedEngine(tokens([2])), model)
    assert (empty["content"], empty["stop_reason"]) == ([], "end_turn")
    types = [event["type"] for event in await streamed(ScriptedEngine(tokens([2])), model)]
    assert types == ["message_start", "message_delta", "message_stop"]
    assert (await ask(saying(model, "the fox"), model, max_tokens=1))["stop_reason"] == "max_tokens"


async def test_an_answer_that_ends_at_a_stop_sequence_tells_which(model: TextModel) -> None:
    engine, stops = saying(model, "one END two"), ["zz", " END"]
    whole = await ask(engine, model, stop_sequences=stops)
    assert whole["content"] == [{"type": "text", "text": "one"}]
    ended = {"stop_reason": "stop_sequence", "stop_sequence": " END"}
    assert {key: whole[key] for key in ended} == ended
    assert (await streamed(engine, model, stop_sequences=stops))[-2]["delta"] == ended


async def test_who_is_refused_at_the_door_is_told_in_anthropics_shape_too(model: TextModel) -> None:
    engine = saying(model, "ok")
    locked = app_of(engine, model, keys=ApiKeys(["k-0123456789abcdef"]))
    busy = app_of(engine, model, doorkeeper=Doorkeeper(ManualClock(), per_s=1, burst=1))
    await post(busy, PATH, max_tokens=5, messages=USER)
    small = app_of(engine, model, max_body=10)
    for app, status, kind in [
        (locked, 401, "authentication_error"), (busy, 429, "rate_limit_error"), (small, 413, "request_too_large")
    ]:  # fmt: skip
        response = await post(app, PATH, max_tokens=5, messages=USER)
        assert response.status_code == status
        assert response.json() == {"type": "error", "error": {"type": kind, "message": ANY}}


async def test_a_conversation_with_tools_becomes_the_templates(model: TextModel) -> None:
    engine = saying(model, "ok")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "weather?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ulm"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "and now?"}]},
    ]  # fmt: skip
    answer = await ask(engine, model, messages=messages, tools=[TOOL], tool_choice={"type": "any"})
    assert answer["type"] == "message", answer
    prompt = model.decode(engine.requests[0].prompt_ids)
    assert f"assistant\nLet me see.\n{CALL}" in prompt
    assert "user\n<tool_response>\nrain\n</tool_response>" in prompt
    assert "user\nand now?" in prompt
    assert engine.requests[0].grammar is not None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking is not supported"),
        ({"stop_sequences": ["a"] * 5}, "stop_sequences"),
        ({"temperature": 1.5}, "temperature"),
        ({"betas": ["x"]}, "betas"),
        ({"output_config": {"effort": "low"}}, "output_config is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"tools": [TOOL, TOOL]}, "same name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "none of the tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "name"),
        ({"tools": [TOOL], "tool_choice": {"type": "any", "name": "weather"}}, "name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
    ],
)
async def test_what_is_wrong_is_an_error_in_anthropics_shape(model: TextModel, change: Any, word: str) -> None:
    body = {"max_tokens": 5, "messages": USER, **change}
    response = await post(app_of(saying(model, "ok"), model), PATH, **body)
    error = response.json()
    assert response.status_code == 400, error
    assert set(error) == {"type", "error"}
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert word in error["error"]["message"]


async def test_errors_of_the_mesh(model: TextModel) -> None:
    engine = saying(model, "the fox")
    missing = await post(app_of(engine, model), PATH, model="other", max_tokens=5, messages=USER)
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    engine = ScriptedEngine([*tokens(model.encode("the fox")), DeadlineError("node-b did not answer", hop_index=1)])
    events = await streamed(engine, model)
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "node-b did not answer"}}
    async with client_of(app_of(engine, model)) as client:
        assert (await client.get(PATH)).json()["type"] == "error"
