"""Every field that OpenAI publishes is honoured, or refused by name; so is what nobody knows."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsStreaming as CompletionParams
from pydantic import ValidationError

from meshnet_core.errors import RequestRefusedError
from meshnet_core.sampling import SamplingParams
from meshnet_gateway.api_errors import from_validation
from meshnet_gateway.api_types import ChatRequest, CompletionRequest

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
PLAIN: dict[str, Any] = {"model": "tiny", "prompt": "hello"}

# A value of each field that only a server with that feature could honour.
REFUSED: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"},
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "metadata": {"a": "b"},
    "modalities": ["text", "audio"],
    "moderation": {"model": "omni"},
    "prediction": {"type": "content", "content": "hello"},
    "prompt_cache_options": {},
    "prompt_cache_retention": "24h",
    "service_tier": "priority",
    "store": True,
    "verbosity": "low",
    "web_search_options": {},
}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
HONOURED: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "logit_bias": {"50256": -100},
    "logprobs": True,
    "max_completion_tokens": 5,
    "max_tokens": 5,
    "messages": CHAT["messages"],
    "model": "tiny",
    "n": 2,
    "parallel_tool_calls": True,
    "presence_penalty": -0.5,
    "prompt_cache_key": "key",
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "safety_identifier": "someone",
    "seed": 7,
    "stop": ["END"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "tool_choice": "auto",
    "tools": TOOLS,
    "top_logprobs": 3,
    "top_p": 0.9,
    "user": "someone",
}
NEEDS: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": TOOLS},
    "parallel_tool_calls": {"tools": TOOLS},
}


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def call(arguments: str) -> dict[str, Any]:
    """A message in which the assistant calls."""
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [CALL | {"function": function}]}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def refusal_of(document: Any, request: type[ChatRequest | CompletionRequest] = ChatRequest) -> dict[str, Any]:
    """The error object for a request that must be refused."""
    with pytest.raises(ValidationError) as caught:
        request.model_validate(document)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    status, body = from_validation(errors, document)
    assert status == 400
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


def test_every_published_chat_parameter_is_either_honoured_or_refused() -> None:
    published = set(typing.get_type_hints(ChatParams))
    assert published == set(REFUSED) | set(HONOURED)
    assert published <= set(ChatRequest.model_fields)


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_that_is_not_supported_is_refused_by_name(field: str) -> None:
    error = refusal_of(CHAT | {field: REFUSED[field]})
    assert error["param"] == field
    assert error["code"] == "unsupported_parameter"
    assert f"{field} is not supported" in error["message"]
    assert ChatRequest.model_validate(CHAT | {field: None})


@pytest.mark.parametrize("field", HONOURED)
def test_a_field_that_is_honoured_passes(field: str) -> None:
    request = ChatRequest.model_validate(CHAT | {field: HONOURED[field]} | NEEDS.get(field, {}))
    assert getattr(request, field) is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1), ("logit_bias", {}), ("response_format", {"type": "text"}), ("tools", []), ("tool_choice", "none"),
        ("functions", []), ("function_call", "none"), ("modalities", ["text"]), ("store", False), ("metadata", {}),
        ("service_tier", "auto"), ("service_tier", "default"), ("stop", []), ("stop", None), ("user", None),
    ],
)  # fmt: skip
def test_what_means_nothing_passes(field: str, value: Any) -> None:
    assert ChatRequest.model_validate(CHAT | {field: value})


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temprature": 0.5}, "temprature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": True}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": 5}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"n": True}, "n"),
        ({"meshnet": {"cache": "maybe"}}, "meshnet.cache"),
        ({"meshnet": {"recovery": "slow"}}, "meshnet.recovery"),
        ({"meshnet": {"speculate": "on"}}, "meshnet.speculate"),
        ({"meshnet": {"speculate": 0}}, "meshnet.speculate"),
        ({"meshnet": {"speculate": 17}}, "meshnet.speculate"),
        ({"meshnet": {"speculate": True}}, "meshnet.speculate"),
        ({"meshnet": {"route": "a"}}, "meshnet.route"),
        ({"model": 5}, "model"),
        ({"user": 5}, "user"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "a", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "function", "content": "a"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "assistant", "content": ""}, call("[1]")]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            {"messages": [{"role": "assistant", "content": ""}, call("{")]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "c"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": TOOLS * 129}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "a"}}}, "response_format.json_schema"),
        ({"response_format": schema_format({"a": "x" * 70_000})}, "response_format.json_schema.schema"),
        ({"response_format": schema_format({"a": "\ud800"})}, "response_format.json_schema.schema"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"messages": [{"role": "user", "content": "a", "name": "bob"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": "a", "mood": "good"}]}, "messages[0].mood"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
            "messages[0].content[1].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
    ],
)
def test_a_wrong_value_is_refused_and_named(change: dict[str, Any], param: str) -> None:
    error = refusal_of(CHAT | change)
    assert error["param"] == param
    assert error["message"]


def test_what_is_wrong_is_told_so_that_it_can_be_mended() -> None:
    parts = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]
    assert "image_url" in refusal_of(CHAT | {"messages": parts})["message"]
    assert "none of this API's" in refusal_of(CHAT | {"temprature": 1})["message"]
    assert refusal_of({"model": "tiny"})["message"] == "messages is required"
    assert refusal_of([])["param"] is None
    assert "JSON object" in refusal_of("text")["message"]


def test_text_parts_and_the_developer_role_become_what_templates_know() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three", "refusal": None, "annotations": [], "tool_calls": None},
    ]
    request = ChatRequest.model_validate(CHAT | {"messages": messages})
    assert [message.for_template() for message in request.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "three"},
    ]


def test_sampling_has_openais_defaults_and_a_minted_seed() -> None:
    one, two = (ChatRequest.model_validate(CHAT).sampling() for _ in range(2))
    assert one == SamplingParams(temperature=1.0, seed=one.seed)
    assert one.seed != two.seed


def test_sampling_takes_every_field() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": -0.2, "seed": 7,
    }  # fmt: skip
    request = ChatRequest.model_validate(CHAT | fields | {"logprobs": True, "top_logprobs": 3})
    assert request.sampling() == SamplingParams(**fields, logprobs=3)
    assert ChatRequest.model_validate(CHAT | {"logprobs": True}).sampling().logprobs == 0
    assert ChatRequest.model_validate(CHAT | {"temperature": 0}).sampling().greedy
    assert ChatRequest.model_validate(CHAT | {"seed": -1}).sampling().seed == 2**63 - 1
    only_the_likeliest = ChatRequest.model_validate(CHAT | {"top_p": 0}).sampling()
    assert (only_the_likeliest.top_k, only_the_likeliest.top_p) == (1, 1.0)


def test_limits_and_stops() -> None:
    assert ChatRequest.model_validate(CHAT).token_limit is None
    assert ChatRequest.model_validate(CHAT | {"max_tokens": 3}).token_limit == 3
    assert ChatRequest.model_validate(CHAT | {"max_completion_tokens": 4}).token_limit == 4
    assert ChatRequest.model_validate(CHAT | {"max_tokens": 4, "max_completion_tokens": 4}).token_limit == 4
    assert ChatRequest.model_validate(CHAT | {"stop": "END"}).stop == ["END"]
    assert ChatRequest.model_validate(CHAT | {"stop": ["a", "b", "c", "d"]}).stop == ["a", "b", "c", "d"]


def test_every_published_completion_parameter_is_either_honoured_or_refused() -> None:
    published = set(typing.get_type_hints(CompletionParams))
    assert published <= set(CompletionRequest.model_fields)
    for field, value in {"best_of": 2, "suffix": "end"}.items():
        error = refusal_of(PLAIN | {field: value}, CompletionRequest)
        assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert refusal_of(PLAIN | {"echo": True, "logprobs": 1}, CompletionRequest)["param"] == "echo"
    for field, value in {"best_of": 1, "echo": True, "suffix": "", "n": 2, "logit_bias": {"1": 1}}.items():
        assert CompletionRequest.model_validate(PLAIN | {field: value})
    request = CompletionRequest.model_validate(PLAIN | {"logprobs": 2})
    assert request.token_limit == 16
    assert request.sampling().logprobs == 2
    assert refusal_of(PLAIN | {"logprobs": 6}, CompletionRequest)["param"] == "logprobs"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]), ([1, 2], [[1, 2]]), (["a"], ["a"]), ([[1, 2]], [[1, 2]]), ("", [""]),
        (["a", "b"], ["a", "b"]), ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)  # fmt: skip
def test_prompts_in_any_form(prompt: Any, expected: Any) -> None:
    assert CompletionRequest.model_validate(PLAIN | {"prompt": prompt}).prompts == expected


@pytest.mark.parametrize("fields", [{"prompt": []}, {"prompt": ["a"] * 129}, {"prompt": ["a"] * 10, "n": 20}])
def test_more_answers_than_a_request_may_have_are_refused(fields: Any) -> None:
    with pytest.raises(RequestRefusedError, match="1 to 128 answers"):
        _ = CompletionRequest.model_validate(PLAIN | fields).prompts


def test_the_answers_of_one_request_have_seeds_of_their_own_that_follow_from_the_first() -> None:
    one, three = (ChatRequest.model_validate(CHAT | {"seed": 7, "n": n}).seeds for n in (1, 3))
    assert (one, three[0], len(set(three))) == ([7], 7, 3)
    assert ChatRequest.model_validate(CHAT | {"seed": 7, "n": 3}).seeds == three
    assert ChatRequest.model_validate(CHAT | {"logit_bias": {"5": 1, "05": 2}}).sampling().logit_bias == ((5, 2.0),)


@pytest.mark.parametrize("prompt", [5, None, ["a", 1], [1.5], [True], [["a"]], {"text": "a"}])
def test_a_prompt_of_another_kind_is_refused(prompt: Any) -> None:
    assert refusal_of(PLAIN | {"prompt": prompt}, CompletionRequest)["param"].startswith("prompt")


@pytest.mark.parametrize(
    "given", [{}, {"meshnet": None}, {"meshnet": {}}, {"meshnet": {"cache": None, "prefix": None, "recovery": None}}]
)
def test_null_for_meshnet_and_what_is_in_it_is_as_if_it_were_not_there(given: dict[str, Any]) -> None:
    for request in (
        ChatRequest.model_validate({**CHAT, **given}),
        CompletionRequest(model="tiny", prompt="a", **given),
    ):
        assert (request.meshnet.cache, request.meshnet.prefix, request.meshnet.recovery) == ("on", "on", None)
