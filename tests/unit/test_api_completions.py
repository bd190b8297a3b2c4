"""What the API answers for stop strings and logprobs, and completions of old."""

from __future__ import annotations

from typing import Any

import pytest

from api_client import USER, app_of, content_of, events_of, post
from meshnet_core.sampling import SampledToken
from meshnet_gateway.generation import PrefillProgress
from meshnet_gateway.text_model import TextModel
from scripted_engine import ScriptedEngine, tokens
from tiny_tokenizers import byte_level_files


@pytest.fixture(scope="module")
def model() -> TextModel:
    return TextModel.from_files("tiny", "f" * 64, byte_level_files())


@pytest.mark.parametrize(
    ("stop", "expected", "finish"),
    [
        ("fox", "the ", "stop"),
        (["brown", " jumps"], "the fox", "stop"),
        ("the", "", "stop"),
        ("lazy", "the fox jumps 你好!", "stop"),
        ("好", "the fox jumps 你", "stop"),
        (["umps 你", "x j"], "the fo", "stop"),
    ],
)
async def test_stop_strings_end_the_answer_and_the_generation(
    model: TextModel, stop: str | list[str], expected: str, finish: str
) -> None:
    said = tokens(model.encode("the fox jumps 你好!"))
    engine = ScriptedEngine(said)
    app = app_of(engine, model)
    whole = (await post(app, messages=USER, stop=stop)).json()
    assert whole["choices"][0]["message"]["content"] == expected
    assert whole["choices"][0]["finish_reason"] == finish
    if expected != "the fox jumps 你好!":
        assert engine.given < len(said)  # nothing is made that nobody will see
        assert whole["usage"]["completion_tokens"] == engine.given
    events = events_of(await post(app, messages=USER, stop=stop, stream=True))
    assert content_of(events) == expected
    assert events[-2]["choices"][0]["finish_reason"] == finish
    assert engine.closed == ["s-1", "s-2"]


async def test_the_stream_is_the_whole_text_to_the_character_wherever_it_ends(model: TextModel) -> None:
    ids = model.encode("ż 你好 👩‍👩‍👧 e\u0301 the fox, hello")
    for end in range(len(ids) + 1):
        app = app_of(ScriptedEngine(tokens(ids[:end]), finish="length"), model)
        fields: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "stop": ["zzz", "👧 e"]}
        whole = (await post(app, **fields)).json()["choices"][0]
        events = events_of(await post(app, stream=True, **fields))
        assert content_of(events) == whole["message"]["content"]
        assert events[-2]["choices"][0]["finish_reason"] == whole["finish_reason"]
        pieces = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
        assert not any("\ufffd" in piece for piece in pieces[:-2])  # only as the last piece, where a character is cut


# -- logprobs ----------------------------------------------------------------------------------------------------------


def with_logprobs(model: TextModel, text: str) -> list[SampledToken]:
    return [SampledToken(token, -0.5, ((token, -0.5), (40, -2.0))) for token in model.encode(text)]


async def test_logprobs_belong_to_the_text_they_come_with(model: TextModel) -> None:
    said = with_logprobs(model, "the fox 你 jumps")
    app = app_of(ScriptedEngine(said), model)
    fields: dict[str, Any] = {"messages": USER, "logprobs": True, "top_logprobs": 2}
    whole = (await post(app, **fields)).json()["choices"][0]
    content = whole["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-0.5] * len(said)
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == whole["message"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(said)
    assert content[0]["top_logprobs"][0]["token"] == content[0]["token"]

    text = ""
    streamed = []
    for event in events_of(await post(app, stream=True, **fields))[1:-2]:
        choice = event["choices"][0]
        text += choice["delta"]["content"]
        streamed += choice["logprobs"]["content"]
        written = bytes(byte for entry in streamed for byte in entry["bytes"]).decode(errors="ignore")
        assert written == text
    assert streamed == content


async def test_logprobs_end_where_a_stop_string_cuts(model: TextModel) -> None:
    said = with_logprobs(model, "the fox jumps")
    app = app_of(ScriptedEngine(said), model)
    choice = (await post(app, messages=USER, logprobs=True, stop=" jumps")).json()["choices"][0]
    written = bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"]).decode()
    assert choice["message"]["content"] == "the fox"
    assert written == "the fox"
    assert (await post(app, messages=USER)).json()["choices"][0]["logprobs"] is None


# -- completions -------------------------------------------------------------------------------------------------------


async def test_completions_whole_and_streamed(model: TextModel) -> None:
    engine = ScriptedEngine([PrefillProgress(1, 1), *tokens(model.encode(" fox 你好"))])
    app = app_of(engine, model)
    whole = (await post(app, "/v1/completions", prompt="the", max_tokens=20)).json()
    assert whole["object"] == "text_completion"
    assert whole["choices"] == [{"index": 0, "text": " fox 你好", "logprobs": None, "finish_reason": "stop"}]
    assert engine.requests[0].prompt_ids == model.encode("the")
    response = await post(
        app, "/v1/completions", prompt=["the"], max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    events = events_of(response)
    assert events[0] == ": meshnet prefill 1/1"
    assert content_of(events) == " fox 你好"
    assert events[-3]["choices"][0]["finish_reason"] == "stop"
    assert events[-3]["meshnet"]["session"] == "s-2"
    assert events[-2]["usage"]["prompt_tokens"] == len(model.encode("the"))
    assert events[-1] == "[DONE]"


async def test_completions_take_token_ids_and_say_length_after_sixteen(model: TextModel) -> None:
    engine = ScriptedEngine(tokens([40] * 30))
    app = app_of(engine, model)
    body = (await post(app, "/v1/completions", prompt=[5, 6, 7])).json()
    assert engine.requests[0].prompt_ids == (5, 6, 7)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 16,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    for prompt in ([model.vocab_size], [-1]):
        error = (await post(app, "/v1/completions", prompt=prompt)).json()["error"]
        assert error["param"] == "prompt"
        assert str(model.vocab_size - 1) in error["message"]
    nothing: list[Any] = ["", [], [[]]]
    for empty in nothing:
        error = (await post(app, "/v1/completions", prompt=empty)).json()["error"]
        assert error["param"] == "prompt"


async def test_completions_logprobs_have_the_old_shape(model: TextModel) -> None:
    said = with_logprobs(model, "the fox")
    body = (await post(app_of(ScriptedEngine(said), model), "/v1/completions", prompt="a", logprobs=2)).json()
    logprobs = body["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == "the fox"
    assert logprobs["token_logprobs"] == [-0.5] * len(said)
    assert logprobs["text_offset"][0] == 0
    assert sorted(logprobs["text_offset"]) == logprobs["text_offset"]
    assert all(len(top) <= 2 for top in logprobs["top_logprobs"])
