"""docs/api.md says what the code does with every field."""

from __future__ import annotations

from pathlib import Path

import pytest

from api_fields_table import NOTES, REQUESTS, section
from meshnet_gateway.api_fields import Body
from meshnet_gateway.tool_format import instructions

DOCS = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


@pytest.mark.parametrize("request_type", REQUESTS)
def test_the_tables_are_those_of_the_code(request_type: type[Body]) -> None:
    assert section(request_type) in DOCS, "run tests/api_fields_table.py and put its tables into docs/api.md"


def test_notes_are_of_fields_that_there_are() -> None:
    assert set(NOTES) <= {name for request in REQUESTS for name in request.model_fields}


def test_the_documented_tool_format_is_the_one_that_models_are_told() -> None:
    said = instructions([{"type": "function"}])
    for line in said.splitlines():
        assert line in DOCS or line == '{"type": "function"}'
