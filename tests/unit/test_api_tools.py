"""Tools, schemas, reasoning and several answers at the API, over a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api_client import USER, app_of, content_of, events_of, post
from meshnet_core.errors import DeadlineError, GrammarError
from meshnet_core.grammar import Grammar
from meshnet_gateway.text_model import TextModel
from scripted_engine import ScriptedEngine, tokens
from tiny_tokenizers import CHAT_TEMPLATE, byte_level_files

KNOWS_TOOLS = (
    "{% if tools %}<|im_start|>system\nTools: {% for tool in tools %}{{ tool | tojson }}{% endfor %} "
    'write <tool_call>\n{"name": 1, "arguments": 2}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = CHAT_TEMPLATE.replace(
    "assistant\n{% endif %}", "assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
THINKS += "{# </think> #}"
WEATHER = {
    "name": "weather",
    "description": "of a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "你好"}}\n</tool_call>'


def text_model(template: str = CHAT_TEMPLATE, **config: Any) -> TextModel:
    files = byte_level_files(template=template)
    files["config.json"] = json.dumps(
        {**json.loads(files["config.json"]), "max_position_embeddings": 4096, **config}
    ).encode()
    return TextModel.from_files("tiny", "f" * 64, files)


@pytest.fixture(scope="module")
def plain() -> TextModel:
    return text_model()


@pytest.fixture(scope="module")
def knowing() -> TextModel:
    return text_model(KNOWS_TOOLS)


@pytest.fixture(scope="module")
def thinker() -> TextModel:
    return text_model(THINKS)


def saying(model: TextModel, text: str, finish: str = "stop") -> ScriptedEngine:
    return ScriptedEngine(tokens(model.encode(text)), finish=finish)


async def both(engine: ScriptedEngine, model: TextModel, **body: Any) -> tuple[dict[str, Any], list[Any]]:
    """The one choice of the whole answer, and the choices of the streamed chunks."""
    whole = await post(app_of(engine, model), messages=USER, **body)
    assert whole.status_code == 200, whole.text
    events = events_of(await post(app_of(engine, model), messages=USER, stream=True, **body))
    assert len(engine.closed) == len(engine.requests)
    return whole.json()["choices"][0], [e["choices"][0] for e in events if isinstance(e, dict) and e["choices"]]


def called(choices: list[Any]) -> list[Any]:
    """Calls put together from their deltas, as clients do."""
    calls: list[Any] = []
    for delta in (call for choice in choices for call in choice["delta"].get("tool_calls", ())):
        if delta["index"] == len(calls):
            calls.append({"id": delta["id"], "type": delta["type"], "function": dict(delta["function"])})
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return calls


@pytest.mark.parametrize("name", ["plain", "knowing"])
async def test_a_call_is_read_whole_and_streamed(name: str, request: pytest.FixtureRequest) -> None:
    model: TextModel = request.getfixturevalue(name)
    whole, chunks = await both(saying(model, f"Let me see.\n{CALL}\n{CALL}"), model, tools=TOOLS)
    message = whole["message"]
    assert (message["content"], whole["finish_reason"]) == ("Let me see.", "tool_calls")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"place": "你好"}'}
    ] * 2
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "Let me see."
    assert [call["function"] for call in called(chunks)] == [call["function"] for call in message["tool_calls"]]
    assert chunks[-1]["finish_reason"] == "tool_calls"


async def test_a_call_alone_has_no_content(plain: TextModel) -> None:
    whole, _ = await both(saying(plain, CALL), plain, tools=TOOLS)
    assert whole["message"]["content"] is None


@pytest.mark.parametrize(
    "text", ["<tool_call>\n{nonsense}\n</tool_call>", CALL.replace("weather", "wether"), CALL[:40]]
)
async def test_a_malformed_call_is_the_models_text(plain: TextModel, text: str) -> None:
    whole, chunks = await both(saying(plain, text), plain, tools=TOOLS)
    assert (whole["message"]["content"], whole["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in whole["message"]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == text


async def test_what_looks_like_a_call_is_text_where_there_are_no_tools(plain: TextModel) -> None:
    whole, _ = await both(saying(plain, CALL), plain)
    assert whole["message"]["content"] == CALL
    whole, _ = await both(saying(plain, CALL), plain, tools=TOOLS, tool_choice="none")
    assert whole["message"]["content"] == CALL


async def test_an_answer_cut_by_max_tokens_says_length(plain: TextModel) -> None:
    whole, chunks = await both(saying(plain, f"{CALL}\n{CALL[:30]}", finish="length"), plain, tools=TOOLS)
    assert whole["finish_reason"] == chunks[-1]["finish_reason"] == "length"
    assert len(whole["message"]["tool_calls"]) == 1


def prompt_of(engine: ScriptedEngine, model: TextModel) -> str:
    return model.decode(engine.requests[-1].prompt_ids)


async def test_a_template_that_knows_no_tools_gets_them_in_the_system_message(plain: TextModel) -> None:
    engine = saying(plain, "ok")
    messages = [
        {"role": "system", "content": "Be brief."},
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Ulm"}'}},
            {"id": "2", "type": "function", "function": {"name": "weather", "arguments": ""}}]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "sun"}]},
    ]  # fmt: skip
    assert (await post(app_of(engine, plain), messages=messages, tools=TOOLS)).status_code == 200
    prompt = prompt_of(engine, plain)
    assert prompt.startswith("system\nBe brief.\n\nYou can call these functions")
    assert '"description": "of a place"' in prompt
    assert '<tool_call>\n{"name": "weather", "arguments": {"place": "Ulm"}}\n</tool_call>' in prompt
    assert "user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>" in prompt


async def test_a_template_that_knows_tools_is_given_them(knowing: TextModel) -> None:
    engine = saying(knowing, "ok")
    messages = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Ulm"}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]  # fmt: skip
    assert (await post(app_of(engine, knowing), messages=messages, tools=TOOLS)).status_code == 200
    prompt = prompt_of(engine, knowing)
    assert prompt.startswith("system\nTools: ")
    assert '<tool_call>{"name": "weather", "arguments": {"place": "Ulm"}}</tool_call>' in prompt.replace("\\", "")
    assert "tool\nrain" in prompt
    assert "You can call these functions" not in prompt


async def test_a_template_that_knows_no_system_is_told_of_tools_by_the_user(plain: TextModel) -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + CHAT_TEMPLATE
    model = text_model(refusing)
    engine = saying(model, "ok")
    assert (await post(app_of(engine, model), messages=USER, tools=TOOLS)).status_code == 200
    assert prompt_of(engine, model).startswith("user\nYou can call these functions")
    assert "\n\nhello" in prompt_of(engine, model)
    response = await post(app_of(engine, model), messages=[{"role": "system", "content": "a"}, *USER], tools=TOOLS)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


def grammar_for(engine: ScriptedEngine) -> Grammar | None:
    return engine.requests[-1].grammar


@pytest.mark.parametrize(
    ("fields", "constrained"),
    [
        ({}, False),
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "none"}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, True),
        ({"tools": [{"type": "function", "function": {**WEATHER, "strict": True}}]}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"response_format": {"type": "text"}}, False),
    ],
)
async def test_which_answers_are_held_to_a_grammar(plain: TextModel, fields: dict[str, Any], constrained: bool) -> None:
    engine = saying(plain, "ok")
    assert (await post(app_of(engine, plain), messages=USER, **{"tools": TOOLS, **fields})).status_code == 200
    grammar = grammar_for(engine)
    assert (grammar is not None) == constrained
    assert grammar is None or set(grammar.stop_ids) == plain.stop_ids


async def test_a_schema_is_told_and_held_to(plain: TextModel) -> None:
    engine = saying(plain, '{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    whole, _ = await both(engine, plain, response_format=form)
    assert whole["message"]["content"] == '{"a": 1}'
    assert f"Answer with JSON that follows this schema:\n{json.dumps(schema)}" in prompt_of(engine, plain)
    grammar = grammar_for(engine)
    assert grammar is not None
    assert "%json" in grammar.lark


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "wizard"}}}},
         "response_format", "Invalid type: wizard"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"not": {}}}}},
         "response_format", r'Unimplemented keys: \["not"\]'),
        ({"tools": [*TOOLS, {"type": "function", "function": {"name": "g", "parameters": {"$ref": "#/nowhere"}}}],
          "tool_choice": "required"}, r"tools\[1\]\.function\.parameters", "nowhere"),
    ],
)  # fmt: skip
async def test_a_bad_schema_is_refused_with_what_is_wrong(
    plain: TextModel, fields: dict[str, Any], param: str, word: str
) -> None:
    response = await post(app_of(saying(plain, "ok"), plain), messages=USER, **fields)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == param.replace("\\", "")
    assert word.replace("\\", "") in error["message"]


async def test_a_refusal_of_the_tail_is_the_clients_to_mend(plain: TextModel) -> None:
    engine = ScriptedEngine([GrammarError("the model has no tokenizer.json", hop_index=1)])
    response = await post(app_of(engine, plain), messages=USER, response_format={"type": "json_object"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "bad_grammar")


async def test_reasoning_is_kept_apart(thinker: TextModel) -> None:
    said = "<think>\nlet me see\n</think>\n\nhello"
    whole, chunks = await both(saying(thinker, said), thinker)
    assert (whole["message"]["reasoning_content"], whole["message"]["content"]) == ("let me see", "hello")
    assert "".join(chunk["delta"].get("reasoning_content", "") for chunk in chunks) == "let me see"
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == "hello"
    whole, _ = await both(saying(thinker, "hello"), thinker)
    assert "reasoning_content" not in whole["message"]


async def test_a_prompt_that_opens_the_reasoning(thinker: TextModel) -> None:
    engine = saying(thinker, "let me see</think>hello")
    whole, _ = await both(engine, thinker, reasoning_effort="high")
    assert prompt_of(engine, thinker).endswith("<think>\n")
    assert (whole["message"]["reasoning_content"], whole["message"]["content"]) == ("let me see", "hello")
    whole, _ = await both(saying(thinker, "hello"), thinker, reasoning_effort="none")
    assert whole["message"]["content"] == "hello"
    engine = saying(thinker, "ok</think>{}")
    await both(engine, thinker, reasoning_effort="high", response_format={"type": "json_object"})
    grammar = grammar_for(engine)
    assert grammar is not None
    assert "</think>" in grammar.lark


async def test_tags_of_a_model_that_does_not_think_are_text(plain: TextModel) -> None:
    whole, _ = await both(saying(plain, "<think>a</think>b"), plain)
    assert whole["message"]["content"] == "<think>a</think>b"
    response = await post(app_of(saying(plain, "ok"), plain), messages=USER, reasoning_effort="low")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "reasoning_effort")


async def test_n_answers_have_places_and_seeds_of_their_own(plain: TextModel) -> None:
    texts = {}
    engine = ScriptedEngine(lambda request: tokens(plain.encode(f"answer {request.sampling.seed % 100}")))
    response = (await post(app_of(engine, plain), messages=USER, n=3, seed=7)).json()
    assert [choice["index"] for choice in response["choices"]] == [0, 1, 2]
    texts = {choice["index"]: choice["message"]["content"] for choice in response["choices"]}
    assert len(set(texts.values())) == 3
    assert texts[0] == "answer 7"
    one = (await post(app_of(engine, plain), messages=USER, seed=7)).json()
    assert response["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert response["usage"]["completion_tokens"] == sum(len(plain.encode(text)) for text in texts.values())
    assert [report["session"] for report in response["meshnet"]["choices"]] == ["s-1", "s-2", "s-3"]
    events = events_of(await post(app_of(engine, plain), messages=USER, n=3, seed=7, stream=True))
    streamed: dict[int, str] = {}
    finishes: dict[int, str] = {}
    for choice in (event["choices"][0] for event in events if isinstance(event, dict)):
        streamed[choice["index"]] = streamed.get(choice["index"], "") + choice["delta"].get("content", "")
        if choice["finish_reason"]:
            finishes[choice["index"]] = choice["finish_reason"]
    assert streamed == texts
    assert finishes == {0: "stop", 1: "stop", 2: "stop"}
    assert sorted(engine.closed) == sorted(f"s-{index}" for index in range(1, 8))


@pytest.mark.parametrize("stream", [True, False])
async def test_one_of_n_that_fails_ends_them_all(plain: TextModel, stream: bool) -> None:
    failure = DeadlineError("node-b did not answer", hop_index=1)
    engine = ScriptedEngine(
        lambda request: [failure] if request.sampling.seed != 7 else tokens(plain.encode("a" * 500))
    )
    response = await post(app_of(engine, plain), messages=USER, n=3, seed=7, stream=stream)
    if response.status_code == 200:
        assert events_of(response)[-2]["error"]["code"] == "deadline"
    else:
        assert response.status_code == 504
    assert sorted(engine.closed) == ["s-1", "s-2", "s-3"]
    assert engine.given < 500


async def test_a_bias_reaches_the_nodes_and_one_out_of_the_vocabulary_is_refused(plain: TextModel) -> None:
    engine = saying(plain, "ok")
    assert (await post(app_of(engine, plain), messages=USER, logit_bias={"7": -100, "9": 2.5})).status_code == 200
    assert engine.requests[-1].sampling.logit_bias == ((7, -100.0), (9, 2.5))
    response = await post(app_of(engine, plain), messages=USER, logit_bias={"999999": 1})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logit_bias")


@pytest.mark.parametrize("stray", [-1, 2**40])
async def test_an_echo_of_ids_that_the_model_lacks_is_refused(plain: TextModel, stray: int) -> None:
    response = await post(app_of(ScriptedEngine(), plain), "/v1/completions", prompt=[40, stray], echo=True)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


async def test_several_prompts_and_echo(plain: TextModel) -> None:
    engine = ScriptedEngine(lambda request: tokens([request.prompt_ids[-1]]))
    fox = list(plain.encode(" fox"))
    body = {"prompt": ["The quick", "hello"], "echo": True, "n": 2, "temperature": 0}
    response = (await post(app_of(engine, plain), "/v1/completions", **body)).json()
    last = [plain.decode(plain.encode(prompt)[-1:]) for prompt in ("The quick", "hello")]
    expected = [f"The quick{last[0]}"] * 2 + [f"hello{last[1]}"] * 2
    assert [choice["text"] for choice in response["choices"]] == expected
    assert response["usage"]["prompt_tokens"] == len(plain.encode("The quick")) + len(plain.encode("hello"))
    events = events_of(await post(app_of(engine, plain), "/v1/completions", stream=True, **body))
    streamed = ["", "", "", ""]
    for choice in (event["choices"][0] for event in events if isinstance(event, dict)):
        streamed[choice["index"]] += choice["text"]
    assert streamed == expected
    ids = (await post(app_of(engine, plain), "/v1/completions", prompt=[fox, fox], echo=True)).json()
    assert len(ids["choices"]) == 2
    assert content_of([ids]).startswith(" fox")
