"""Grammars of answers: from a response format and tools to rules that the tail can hold an answer to. Pure.

JSON is written on one line, a space after commas and colons: a model that may write white space without end does so.
An object that names its properties gets no others unless its schema says so, where that is safe to say.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from meshnet_core.errors import InvalidInputError, RequestRefusedError
from meshnet_core.grammar import Grammar, panics_as
from meshnet_gateway.answer_parts import THOUGHT
from meshnet_gateway.tool_format import ToolFormat

MAX_CALLS = 8  # of one answer; a small model that may call for ever does
_ON_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_COMPOSED = {"allOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "patternProperties", "$dynamicRef"}
_ANY_TEXT = "/(?s:.*)/"


def grammar_of_schema(schema: Mapping[str, Any], *, thinks: bool) -> str:
    """Rules for an answer that follows a JSON schema, after the rest of its reasoning where it ``thinks``."""
    return _after_thoughts(f"start: answer\nanswer: {_json(schema)}\n", thinks=thinks)


def grammar_of_calls(
    schemas: Mapping[str, Mapping[str, Any]],
    form: ToolFormat,
    *,
    most: int,
    thinks: bool,
    or_schema: Mapping[str, Any] | None = None,
    or_text: bool = False,
) -> str:
    """Rules for one or more calls.

    Args:
        schemas: of the arguments, by function.
        form: how calls are written.
        most: calls in one answer.
        thinks: the prompt ends within reasoning, which comes first.
        or_schema: the answer may follow this schema instead.
        or_text: the answer may be text too, or text and then calls.
    """
    begin, end = (f"{form.begin}\n", f"\n{form.end}") if not form.bare else ("", "")
    heads = [f'{{"name": {json.dumps(name)}, "{form.arguments}": ' for name in schemas]
    body = " | ".join(f'{_text(head)} args_{at} "}}"' for at, head in enumerate(heads))
    arguments = "".join(f"args_{at}: {_json(schema)}\n" for at, schema in enumerate(schemas.values()))
    further = f"({_text(chr(10) + begin)} one {_text(end)}){{0,{most - 1}}}" if most > 1 and not form.bare else ""
    inner = f"one {_text(end)} {further}".strip() if end else "one"
    rules = f"one: {body}\n{arguments}"
    starts = [f"{_text(begin)} {inner}" if begin else inner]
    if or_schema is not None:
        starts.append("answer")
        rules += f"answer: {_json(or_schema)}\n"
    if or_text:
        # Calls come after the first tag, and text without one is free.
        starts = ["TEXT", f"lead {_text(chr(10))} {inner}"]
        tag = form.begin.replace("/", r"\/")
        rules += f"TEXT: {_ANY_TEXT} & ~/(?s:.*){tag}(?s:.*)/\nlead[suffix={_text(form.begin)}]: {_ANY_TEXT}\n"
        thinks = False  # reasoning is text like any other
    return _after_thoughts(f"start: {' | '.join(starts)}\n{rules}", thinks=thinks)


def checked(lark: str, stop_ids: Iterable[int], param: str) -> Grammar:
    """The grammar, once the library that the tail holds answers to it with has read it.

    Args:
        lark: rules.
        stop_ids: of the model.
        param: the field of the request to name where it cannot be read.

    Raises:
        RequestRefusedError: a schema asks for what is not supported, contradicts itself, or is too large.
    """
    limits, text = LLParserLimits(verbose_errors=False), LLMatcher.grammar_from_lark(lark)
    try:
        grammar = Grammar(lark, tuple(sorted(stop_ids)))
        with panics_as(InvalidInputError):
            failed, messages = LLMatcher.validate_grammar_with_warnings(text, limits=limits)
    except InvalidInputError as error:
        raise RequestRefusedError(f"{param} cannot be followed: {error.message}", param=param) from error
    if failed:
        raise RequestRefusedError(f"{param} cannot be followed: {_reason(messages)}", param=param)
    return grammar


def _reason(messages: Sequence[str]) -> str:
    """What is wrong with a schema, without the place in a grammar that the client has never seen."""
    text = next(iter(messages), "unknown")
    _, found, reason = text.partition("failed to compile JSON schema: ")
    text = reason if found else text
    return text.partition("\n   1 |")[0].partition("\n   2 |")[0].strip()[:400]


def _after_thoughts(rules: str, *, thinks: bool) -> str:
    if not thinks:
        return rules
    first, _, rest = rules.partition("\n")
    start = first.removeprefix("start: ")
    return f'start: thoughts GAP ({start})\nthoughts[suffix="{THOUGHT}"]: {_ANY_TEXT}\nGAP: /\\n{{0,2}}/\n{rest}'


def _text(literal: str) -> str:
    return json.dumps(literal)


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**_closed(schema), "x-guidance": _ON_ONE_LINE})


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, whose objects have no properties but those they name; unchanged where its parts are combined in ways
    in which one part's properties are unknown to another."""
    text = json.dumps(schema)
    if any(f'"{word}"' in text for word in _COMPOSED):
        return dict(schema)
    closed: dict[str, Any] = _close(schema)
    return closed


def _close(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for key in ("properties", "$defs", "definitions"):
        if isinstance(found.get(key), Mapping):
            found[key] = {name: _close(part) for name, part in found[key].items()}
    for key in ("items", "additionalProperties"):
        if key in found:
            found[key] = _close(found[key])
    for key in ("anyOf", "prefixItems"):
        if isinstance(found.get(key), list):
            found[key] = [_close(part) for part in found[key]]
    named = found.get("properties")
    required = found.get("required", [])
    if (
        isinstance(named, dict)
        and not {"additionalProperties", "unevaluatedProperties", "anyOf", "$ref", "minProperties"} & set(found)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in named for name in required)
    ):
        found["additionalProperties"] = False
    return found
