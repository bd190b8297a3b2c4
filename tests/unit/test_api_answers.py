"""The API's answers, whole and streamed, over a scripted engine."""

from __future__ import annotations

from typing import Any

import pytest

from api_client import USER, app_of, content_of, events_of, post
from meshnet_core.errors import DeadlineError, LayersUnavailableError
from meshnet_gateway.generation import PrefillProgress
from meshnet_gateway.text_model import TextModel
from scripted_engine import ScriptedEngine, tokens
from tiny_tokenizers import byte_level_files


@pytest.fixture(scope="module")
def model() -> TextModel:
    return TextModel.from_files("tiny", "f" * 64, byte_level_files())


async def test_whole_answer(model: TextModel) -> None:
    said = model.encode("The fox 你好")
    engine = ScriptedEngine(tokens(said))
    response = await post(app_of(engine, model), messages=USER)
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "The fox 你好", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = len(model.render_chat(USER))
    assert body["usage"]["prompt_tokens"] == prompt
    assert body["usage"]["completion_tokens"] == len(said)
    assert body["usage"]["total_tokens"] == prompt + len(said)
    assert body["meshnet"]["session"] == "s-1"
    assert body["meshnet"]["seed"] == engine.requests[0].sampling.seed
    assert response.headers["x-request-id"] == body["id"]
    assert engine.closed == ["s-1"]


async def test_streamed_answer_has_progress_pieces_ending_usage_and_done(model: TextModel) -> None:
    engine = ScriptedEngine([PrefillProgress(9, 18), PrefillProgress(18, 18), *tokens(model.encode("The fox 你好"))])
    response = await post(app_of(engine, model), messages=USER, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "no-cache" in response.headers["cache-control"]
    assert response.headers["x-accel-buffering"] == "no"
    events = events_of(response)
    assert events[:2] == [": meshnet prefill 9/18", ": meshnet prefill 18/18"]
    assert events[2]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert content_of(events) == "The fox 你好"
    ending, usage, done = events[-3:]
    assert ending["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert ending["meshnet"]["session"] == "s-1"
    assert ending["usage"] is None
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(model.encode("The fox 你好"))
    assert done == "[DONE]"
    assert engine.closed == ["s-1"]


async def test_first_token_is_the_end(model: TextModel) -> None:
    engine = ScriptedEngine(tokens([2]))
    whole = (await post(app_of(engine, model), messages=USER)).json()
    assert whole["choices"][0]["message"]["content"] == ""
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == 0
    events = events_of(await post(app_of(engine, model), messages=USER, stream=True))
    assert [event if isinstance(event, str) else event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {},
        "[DONE]",
    ]
    assert events[1]["choices"][0]["finish_reason"] == "stop"


HARD = [
    "你好、世界",
    "안녕하세요",
    "👩‍👩‍👧‍👦!",
    "🏳️‍🌈",
    "e\u0301 x\u0323\u0307",
    "नमस्ते",
    "a\u200db",
    "\u2028",
    "ż e\u0301",
]


@pytest.mark.parametrize("text", HARD)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_wherever_the_tokens_are_cut_no_character_breaks(model: TextModel, text: str, path: str) -> None:
    said = tokens(model.encode(text))
    for count in range(1, len(said) + 1):
        app = app_of(ScriptedEngine(said[:count]), model)
        asked: dict[str, Any] = {"messages": USER} if "chat" in path else {"prompt": "hello", "max_tokens": 60}
        whole = (await post(app, path, **asked)).json()["choices"][0]
        content = whole["message"]["content"] if "chat" in path else whole["text"]
        events = events_of(await post(app, path, stream=True, **asked))
        assert content_of(events) == content
        assert text.startswith(content)
        assert len(content) >= len(model.decode(token.id for token in said[: max(0, count - 3)]))
    assert content == text


async def test_prefill_error_before_anything_was_sent_has_a_status(model: TextModel) -> None:
    engine = ScriptedEngine([LayersUnavailableError("layers 2-3 of tiny are served by no node")])
    for stream in (False, True):
        response = await post(app_of(engine, model), messages=USER, stream=stream)
        assert response.status_code == 503
        assert response.json() == {
            "error": {
                "message": "layers 2-3 of tiny are served by no node",
                "type": "server_error",
                "param": None,
                "code": "layers_unavailable",
            }
        }
    assert engine.closed == ["s-1", "s-2"]


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (LayersUnavailableError("layers 2-3 are served by no node"), "layers_unavailable"),
        (ValueError("secret"), "internal"),
    ],
)
async def test_an_error_after_progress_was_told_is_an_event(model: TextModel, failure: Exception, code: str) -> None:
    engine = ScriptedEngine([PrefillProgress(256, 1000), failure])
    response = await post(app_of(engine, model), messages=USER, stream=True)
    assert response.status_code == 200  # it went out with the progress
    progress, error, done = events_of(response)
    assert progress == ": meshnet prefill 256/1000"
    assert error["error"]["code"] == code
    assert "secret" not in response.text
    assert done == "[DONE]"
    assert engine.closed == ["s-1"]


async def test_an_error_before_the_first_text_is_an_event_once_progress_was_told(model: TextModel) -> None:
    half = tokens(model.encode("你"))[:1]  # of a character, so that no text has come yet
    engine = ScriptedEngine([PrefillProgress(5, 5), *half, DeadlineError("node-b did not answer", hop_index=1)])
    events = events_of(await post(app_of(engine, model), messages=USER, stream=True))
    assert events[-2]["error"]["code"] == "deadline"
    assert events[-1] == "[DONE]"


async def test_error_in_mid_stream_is_an_event_and_nothing_sent_is_lost(model: TextModel) -> None:
    said = tokens(model.encode("The fox E"))
    engine = ScriptedEngine([*said, DeadlineError("node-b did not answer within 60 s", hop_index=1)])
    response = await post(app_of(engine, model), messages=USER, stream=True, stop="END")
    assert response.status_code == 200
    events = events_of(response)
    assert content_of(events) == "The fox E"  # what was held back as a possible stop string included
    assert events[-2]["error"] == {
        "message": "node-b did not answer within 60 s",
        "type": "server_error",
        "param": None,
        "code": "deadline",
        "hop_index": 1,
    }
    assert events[-1] == "[DONE]"
    assert engine.closed == ["s-1"]
    assert (await post(app_of(engine, model), messages=USER)).status_code == 504
