"""Reasoning, content and calls told apart, whatever the pieces; what looks like a call and is none is text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshnet_gateway.answer_parts import CallingText, Content, Part, PlainText, Reasoning, TextReader, ThinkingText
from meshnet_gateway.tool_format import HERMES, LLAMA3, ToolCall

NAMES = frozenset({"f", "g"})


def hermes() -> TextReader:
    return CallingText(HERMES, NAMES, most=2)


def llama3() -> TextReader:
    return CallingText(LLAMA3, NAMES, most=1)


def thinking() -> TextReader:
    return ThinkingText(PlainText(), opened=False)


def opened() -> TextReader:
    return ThinkingText(hermes(), opened=True)


def parts_of(reader: TextReader, pieces: Sequence[str]) -> list[Part]:
    """Parts, with neighbours of a kind joined."""
    found: list[Part] = []
    for part in [*(part for piece in pieces for part in reader.feed(piece)), *reader.flush()]:
        last = found[-1] if found else None
        if isinstance(part, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + part.text)
        else:
            found.append(part)
    return found


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call>'
F = ToolCall("f", '{"a": "ü"}')

TABLE: list[tuple[Callable[[], TextReader], str, list[Part]]] = [
    (hermes, "", []),
    (hermes, "hello", [Content("hello")]),
    (hermes, "a < b \n", [Content("a < b \n")]),
    (hermes, CALL, [F]),
    (hermes, f"Let me see.\n{CALL}\n", [Content("Let me see."), F]),
    (hermes, f"{CALL}\n{CALL}", [F, F]),
    (hermes, f"{CALL}{CALL}{CALL}", [F, F, Content(CALL)]),  # more than may be
    (hermes, f"{CALL} and so", [F, Content(" and so")]),
    (hermes, CALL.removesuffix("\n</tool_call>"), [F]),  # the model ended without the closing tag
    (hermes, CALL[:30], [Content(CALL[:30])]),  # cut
    (hermes, CALL.replace("ü", "}}</tool_call> 1"), [ToolCall("f", '{"a": "}}</tool_call> 1"}')]),  # as was seen
    (hermes, CALL.replace("ü", '\\\\\\"</tool_call>'), [ToolCall("f", '{"a": "\\\\\\"</tool_call>"}')]),
    (hermes, f'<tool_call>"</tool_call>{CALL}', [Content(f'<tool_call>"</tool_call>{CALL}')]),
    (hermes, "<tool_call>nonsense</tool_call>", [Content("<tool_call>nonsense</tool_call>")]),
    (hermes, CALL.replace('"f"', '"h"'), [Content(CALL.replace('"f"', '"h"'))]),  # no such function
    (hermes, CALL.replace('{"a": "ü"}', "[1]"), [Content(CALL.replace('{"a": "ü"}', "[1]"))]),
    (hermes, CALL.replace('{"a": "ü"}', json.dumps('{"a": "ü"}')), [F]),  # arguments as text, as some models write
    (hermes, CALL.replace("arguments", "parameters"), [F]),
    (hermes, '<tool_call>{"name": "g"}</tool_call>', [ToolCall("g", "{}")]),
    (hermes, '<tool_call>{"name": "g", "arguments": {"a": "\\ud800"}}</tool_call>',
     [Content('<tool_call>{"name": "g", "arguments": {"a": "\\ud800"}}</tool_call>')]),
    (hermes, "<tool_call>" + "[" * 9999, [Content("<tool_call>" + "[" * 9999)]),
    (llama3, '{"name": "f", "parameters": {"a": "ü"}}', [F]),
    (llama3, ' {"name": "f", "parameters": {"a": "ü"}}\n', [F]),
    (llama3, '{"answer": 5}', [Content('{"answer": 5}')]),
    (llama3, 'It is {"name": "f"}', [Content('It is {"name": "f"}')]),
    (thinking, "hello <think>", [Content("hello <think>")]),
    (thinking, "<think>\nlet me\nsee\n</think>\n\nhello\n", [Reasoning("let me\nsee"), Content("hello\n")]),
    (thinking, " \n<think></think>hello", [Content("hello")]),
    (thinking, "<think>let me", [Reasoning("let me")]),
    (thinking, "<thin", [Content("<thin")]),
    (thinking, "<thing>", [Content("<thing>")]),
    (opened, "let </me> </think> hello", [Reasoning("let </me>"), Content("hello")]),
    (opened, f"so</think>\n{CALL}", [Reasoning("so"), F]),
    (opened, f"{CALL} </think>", [Reasoning(CALL)]),
]  # fmt: skip


@pytest.mark.parametrize(("reader", "text", "expected"), TABLE)
def test_parts(reader: Callable[[], TextReader], text: str, expected: list[Part]) -> None:
    assert parts_of(reader(), [text]) == expected
    assert parts_of(reader(), list(text)) == expected


@given(
    st.sampled_from([hermes, llama3, thinking, opened]),
    st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}',
                              " ", "\n", "<", "a", "<tool", "{", '"', "\\"]), max_size=12),
    st.data(),
)  # fmt: skip
@example(hermes, ["a", " ", "<", "a"], None)
def test_nothing_depends_on_how_the_text_is_cut(
    reader: Callable[[], TextReader], words: list[str], data: st.DataObject | None
) -> None:
    text = "".join(words)
    cuts = [] if data is None else sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parts_of(reader(), [text])
    assert parts_of(reader(), pieces) == whole
    assert parts_of(reader(), list(text)) == whole


@given(st.text())
def test_text_without_tags_passes_unchanged(text: str) -> None:
    if "<" not in text:
        assert "".join(part.text for part in parts_of(hermes(), list(text)) if isinstance(part, Content)) == text
