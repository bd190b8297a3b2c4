"""Which answers the grammars accept: schemas, calls, either of them, text and then calls, reasoning before."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from meshnet_core.errors import RequestRefusedError
from meshnet_gateway.answer_grammar import checked, grammar_of_calls, grammar_of_schema
from meshnet_gateway.tool_format import HERMES, LLAMA3
from tiny_tokenizers import ascii_files

PLACE: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
LINKED: dict[str, Any] = {
    "$ref": "#/$defs/p",
    "$defs": {"p": {"type": "object", "properties": {"b": {"type": "null"}}}},
}
TOOLS = {"f": PLACE, "g": LINKED}
F = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
G = '<tool_call>\n{"name": "g", "arguments": {"b": null}}\n</tool_call>'
LARK = {
    "schema": grammar_of_schema(PLACE, thinks=False),
    "thought schema": grammar_of_schema(PLACE, thinks=True),
    "calls": grammar_of_calls(TOOLS, HERMES, most=2, thinks=False),
    "one call": grammar_of_calls(TOOLS, HERMES, most=1, thinks=False),
    "thought call": grammar_of_calls(TOOLS, HERMES, most=1, thinks=True),
    "bare call": grammar_of_calls(TOOLS, LLAMA3, most=8, thinks=False),
    "call or schema": grammar_of_calls(TOOLS, HERMES, most=2, thinks=False, or_schema={"type": "array", "maxItems": 0}),
    "text or calls": grammar_of_calls(TOOLS, HERMES, most=2, thinks=True, or_text=True),
}


@functools.cache
def vocabulary() -> LLTokenizer:
    return LLTokenizer(ascii_files()["tokenizer.json"].decode(), n_vocab=97, eos_token=[2])


def reads(lark: str, text: str) -> tuple[bool, bool]:
    """Whether the grammar lets ``text`` be written, and whether it may end there."""
    matcher = LLMatcher(vocabulary(), LLMatcher.grammar_from_lark(lark), log_level=0)
    ids = vocabulary().tokenize_str(text)
    taken = matcher.try_consume_tokens(ids) == len(ids)
    return taken, taken and matcher.is_accepting()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("schema", '{"a": "x"}'),
        ("thought schema", 'let {"me} see</think>\n\n{"a": "y"}'),
        ("thought schema", '</think>{"a": "y"}'),
        ("calls", F), ("calls", G), ("calls", f"{F}\n{G}"),
        ("one call", F),
        ("thought call", f"hm</think>{F}"),
        ("bare call", '{"name": "f", "parameters": {"a": "y"}}'),
        ("call or schema", "[]"), ("call or schema", f"{F}\n{F}"),
        ("text or calls", ""), ("text or calls", "hello < there"), ("text or calls", f"hello\n{F}"),
        ("text or calls", f"{G}\n{F}"), ("text or calls", "<think>hm</think>"),
    ],
)  # fmt: skip
def test_what_may_be_the_whole_answer(kind: str, text: str) -> None:
    assert reads(LARK[kind], text) == (True, True)
    assert checked(LARK[kind], [2, 0], "tools").stop_ids == (0, 2)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("schema", '{"a": "x"'), ("thought schema", "let me see"), ("calls", F[:20]), ("calls", f"{F}\n{G[:5]}"),
        ("text or calls", "<tool_call>"), ("text or calls", f"hello {F[:40]}"),
    ],
)  # fmt: skip
def test_what_may_be_an_answers_beginning_and_not_its_end(kind: str, text: str) -> None:
    assert reads(LARK[kind], text) == (True, False)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("schema", '{"a":"x"}'), ("schema", '{"a": "z"}'), ("schema", '{ "a": "x"}'), ("schema", '{"a": "x", "b": 1}'),
        ("schema", '{"a": "x"} '), ("schema", "hello"), ("schema", "{}"),
        ("calls", "hello"), ("calls", f"{F}\n{F}\n{F}"), ("calls", F.replace('"f"', '"h"')), ("calls", f"{F} "),
        ("calls", F.replace('"f"', '"g"')),
        ("one call", f"{F}\n{F}"),
        ("bare call", '{"name": "f", "arguments": {"a": "y"}}'),
        ("call or schema", "[1]"),
        ("text or calls", f"{F} hello"), ("text or calls", "<tool_call> no"),
    ],
)  # fmt: skip
def test_what_may_not_be_written(kind: str, text: str) -> None:
    assert reads(LARK[kind], text) == (False, False)


def test_a_grammar_that_is_too_large_is_refused() -> None:
    schema = {"enum": ["x" * 1000 + str(at) for at in range(200)]}
    with pytest.raises(RequestRefusedError, match=r"131072 bytes, not \d+"):
        checked(grammar_of_schema(schema, thinks=False), [2], "response_format")
