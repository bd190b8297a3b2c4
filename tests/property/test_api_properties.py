"""Whatever a client sends, the answer is an answer or an error in OpenAI's shape; never a 500."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from api_client import USER, app_of, client_of
from meshnet_gateway.api_types import ChatRequest, CompletionRequest
from meshnet_gateway.text_model import TextModel
from scripted_engine import ScriptedEngine, tokens
from tiny_tokenizers import byte_level_files

SETTINGS = settings(deadline=None, max_examples=30)  # each builds an app and asks it twice
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted(set(ChatRequest.model_fields) | set(CompletionRequest.model_fields))
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "developer", "tool"]), "content": JSON},
        optional={"name": JSON, "tool_calls": JSON},
    ),
    max_size=3,
)


@functools.cache
def model() -> TextModel:
    return TextModel.from_files("tiny", "f" * 64, byte_level_files())


def check(path: str, body: Any) -> None:
    async def send() -> None:
        engine = ScriptedEngine(tokens(model().encode("the fox")))
        async with client_of(app_of(engine, model())) as client:
            response = await client.post(path, json=body)
        if response.status_code == 200:
            assert len(engine.closed) == 1
            return
        assert 400 <= response.status_code < 500, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["type"] == "invalid_request_error"

    asyncio.run(send())


@SETTINGS
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3))
def test_any_value_in_any_field(fields: dict[str, Any]) -> None:
    check("/v1/chat/completions", {"model": "tiny", "messages": USER, **fields})
    check("/v1/completions", {"model": "tiny", "prompt": "hello", **fields})


@SETTINGS
@given(MESSAGES)
def test_any_messages(messages: list[Any]) -> None:
    check("/v1/chat/completions", {"model": "tiny", "messages": messages})


@SETTINGS
@given(JSON)
def test_any_body(body: Any) -> None:
    check("/v1/chat/completions", body)
    check("/v1/completions", body)
