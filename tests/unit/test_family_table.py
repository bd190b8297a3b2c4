"""``docs/families.md`` says what the registry and the tests say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from family_table import table
from meshnet_node.family_support import FAMILIES, REASONS, TEXT_TOWERS

DOCUMENT = Path(__file__).parents[2] / "docs" / "families.md"


@pytest.mark.long
def test_the_table_is_up_to_date(tmp_path: Path) -> None:
    assert DOCUMENT.read_text("utf-8") == table(tmp_path), (
        "make it anew: python tests/family_table.py > docs/families.md"
    )


def test_every_family_of_the_registry_has_a_row_and_no_other() -> None:
    text = DOCUMENT.read_text("utf-8")
    rows = set(re.findall(r"^\| (\w+) \|", text, flags=re.MULTILINE)) - {"family", "checkpoint"}
    assert rows == FAMILIES.keys() | REASONS.keys() | TEXT_TOWERS.keys()
    for reason in REASONS.values():
        assert reason in text
    for family in FAMILIES.values():
        assert family.note in text
