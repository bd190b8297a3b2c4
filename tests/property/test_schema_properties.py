"""Whatever schema a client sends, it is followed or refused with a reason; the library's own failures included."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from meshnet_core.errors import RequestRefusedError
from meshnet_gateway.answer_grammar import checked, grammar_of_calls, grammar_of_schema
from meshnet_gateway.tool_format import HERMES, LLAMA3

KEYS = [
    "type", "properties", "items", "required", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "minLength",
    "maxLength", "pattern", "minimum", "maximum", "multipleOf", "minItems", "maxItems", "additionalProperties",
    "format", "prefixItems", "patternProperties", "x-guidance", "minProperties", "not", "if", "default",
]  # fmt: skip
WORDS = [
    "string", "object", "array", "integer", "number", "boolean", "null", "#", "#/$defs/a", "#/properties/a", "date",
    "uuid", "^a+$", "(a", "a{1,100000}", "(a{1,1000}){1,1000}",
]  # fmt: skip
LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=6)
    | st.sampled_from(WORDS)
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)
# It panicked over its own error message, which it cut within a character.
CUT_WITHIN_A_CHARACTER = {"const": {"maxLength": {"items": -4}}, "not": [], "u" * 51: "\u009b" * 20}
SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


@SETTINGS
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5))
@example(CUT_WITHIN_A_CHARACTER)
def test_a_schema_is_followed_or_refused_with_a_reason(schema: dict[str, Any]) -> None:
    for rules in (
        grammar_of_schema(schema, thinks=False),
        grammar_of_schema(schema, thinks=True),
        grammar_of_calls({"f": schema, "g": {}}, HERMES, most=3, thinks=False, or_text=True),
        grammar_of_calls({"f": {}, "g": schema}, LLAMA3, most=1, thinks=True, or_schema=schema),
    ):
        refusal = None
        try:
            assert checked(rules, [2], "response_format").lark == rules
        except RequestRefusedError as error:
            refusal = error
        if refusal is not None:
            assert refusal.param == "response_format"
            assert refusal.message.removeprefix("response_format cannot be followed: ")


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        ({"type": "object", "properties": {"a": {}}}, True),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, False),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, False),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, False),
        ({"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, False),
        ({"type": "object"}, False),
    ],
)
def test_objects_are_closed_where_that_is_safe(schema: dict[str, Any], closed: bool) -> None:
    assert ('"additionalProperties": false' in grammar_of_schema(schema, thinks=False)) == closed
