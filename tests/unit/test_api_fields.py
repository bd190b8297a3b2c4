"""Every field that is honoured changes something: what the engine is asked, what is answered, or what is logged."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from api_client import USER, app_of, post
from meshnet_gateway.api_fields import Body
from meshnet_gateway.api_types import ChatRequest, CompletionRequest
from meshnet_gateway.messages_types import MessagesRequest
from meshnet_gateway.text_model import TextModel
from scripted_engine import ScriptedEngine, tokens
from tiny_tokenizers import CHAT_TEMPLATE, byte_level_files

SAID = 'the fox <tool_call>{"name": "f"}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ANTHROPIC_TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]
# What each endpoint is asked for, with a field and without it; the second part is what the field needs beside it.
SHARED: dict[str, tuple[Any, dict[str, Any]]] = {
    "stream": (True, {}),
    "max_tokens": (3, {}),
    "temperature": (0.5, {}),
    "top_p": (0.5, {}),
    "top_k": (5, {}),
    "meshnet": ({"cache": "off"}, {}),
}
OPENAI: dict[str, tuple[Any, dict[str, Any]]] = {
    **SHARED,
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "stop": ("fox", {}),
    "min_p": (0.1, {}),
    "repetition_penalty": (1.1, {}),
    "presence_penalty": (0.5, {}),
    "frequency_penalty": (0.5, {}),
    "seed": (8, {}),
    "n": (2, {}),
    "logit_bias": ({"7": 5}, {}),
    "user": ("someone", {}),
}
CHAT: dict[str, tuple[Any, dict[str, Any]]] = {
    **OPENAI,
    "messages": ([{"role": "user", "content": "another"}], {}),
    "max_completion_tokens": (3, {}),
    "logprobs": (True, {}),
    "top_logprobs": (2, {"logprobs": True}),
    "response_format": ({"type": "json_object"}, {}),
    "tools": (TOOLS, {}),
    "tool_choice": ("required", {"tools": TOOLS}),
    "parallel_tool_calls": (False, {"tools": TOOLS, "tool_choice": "required"}),
    "reasoning_effort": ("low", {}),
    "safety_identifier": ("someone", {}),
    "prompt_cache_key": ("key", {}),
}
PLAIN: dict[str, tuple[Any, dict[str, Any]]] = {
    **OPENAI,
    "prompt": ("another", {}),
    "logprobs": (2, {}),
    "best_of": (2, {"n": 2}),
    "echo": (True, {}),
}
ANTHROPIC: dict[str, tuple[Any, dict[str, Any]]] = {
    **SHARED,
    "messages": ([{"role": "user", "content": "another"}], {}),
    "system": ("Be brief.", {}),
    "stop_sequences": (["fox"], {}),
    "tools": (ANTHROPIC_TOOLS, {}),
    "tool_choice": ({"type": "any"}, {"tools": ANTHROPIC_TOOLS}),
    "metadata": ({"user_id": "someone"}, {}),
}
ENDPOINTS: dict[str, tuple[type[Body], dict[str, Any], dict[str, tuple[Any, dict[str, Any]]]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": USER, "seed": 7}, CHAT),
    "/v1/completions": (CompletionRequest, {"prompt": "hello", "seed": 7, "max_tokens": 50}, PLAIN),
    "/v1/messages": (MessagesRequest, {"messages": USER, "max_tokens": 50}, ANTHROPIC),
}
UNCHANGED = {"model": "there is one, and another is a 404", "best_of": "only what n says already is accepted"}


@pytest.fixture(scope="module")
def model() -> TextModel:
    files = byte_level_files(template=CHAT_TEMPLATE + "{# {{ reasoning_effort }} #}{{ reasoning_effort }}")
    files["config.json"] = json.dumps({**json.loads(files["config.json"]), "max_position_embeddings": 4096}).encode()
    return TextModel.from_files("tiny", "f" * 64, files)


async def observed(model: TextModel, path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture) -> list[Any]:
    """All that a request brought about, without what differs from one to the next anyway."""
    caplog.clear()
    engine = ScriptedEngine(tokens(model.encode(SAID)))
    response = await post(app_of(engine, model), path, **body)
    assert response.status_code == 200, response.text
    requests = []
    for request in engine.requests:
        seed = request.sampling.seed if "seed" in body else None
        requests.append([repr(request).replace(f"seed={request.sampling.seed}", ""), seed])
    text = response.text
    if not body.get("stream"):
        document = response.json()
        for name in ("id", "created", "meshnet"):
            document.pop(name, None)
        text = json.dumps(document)
    said = [record.getMessage().rpartition(" user=")[2] for record in caplog.records if " user=" in record.getMessage()]
    chunks = len(text.split("\n\n")) if body.get("stream") else text
    return [response.headers["content-type"], chunks, requests, said]


@pytest.mark.parametrize(
    ("path", "field"), [(path, field) for path, (_, _, fields) in ENDPOINTS.items() for field in fields]
)
async def test_a_field_that_is_honoured_changes_something(
    model: TextModel, path: str, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    _, base, fields = ENDPOINTS[path]
    value, needs = fields[field]
    without = await observed(model, path, {**base, **needs}, caplog)
    changed = await observed(model, path, {**base, **needs, field: value}, caplog)
    assert (changed != without) == (field not in UNCHANGED)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_no_field_is_left_out(path: str) -> None:
    request, _, fields = ENDPOINTS[path]
    honoured = {
        name
        for name, field in request.model_fields.items()
        if not any(type(mark).__name__ == "NeutralOnly" for mark in field.metadata)
    }
    assert honoured - set(fields) <= {"model"}
    assert set(fields) <= honoured
