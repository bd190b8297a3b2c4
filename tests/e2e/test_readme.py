"""README as a newcomer takes it: each section's commands are typed as they stand, on hosts that are network namespaces,
with the real SmolLM2; what they say must be what the text promises. The other pages are in `test_guides.py`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from documents import ROOT, blocks, sections
from guide_scenes import README_SECTIONS
from typist import typist

pytestmark = [pytest.mark.long, pytest.mark.real_model, pytest.mark.timeout(2400)]


@pytest.mark.parametrize("section", README_SECTIONS)
def test_a_section_of_the_readme_does_what_it_says(section: str, tmp_path: Path) -> None:
    with typist(tmp_path) as one:
        for block in sections(ROOT / "README.md")[section]:
            one.type_block(block, "kitchen")
        if section == "Use it":
            for program in blocks(ROOT / "README.md", "python"):
                (one.folder / "program.py").write_text(program)
                one.type("python program.py", "kitchen")
                assert "tokens_per_s" in one.said[-1][1]  # its report
        one.look()
        answers = "\n".join(text for line, text in one.said if line.startswith("meshnet chat"))
        assert re.search(r"red|blue|green|colou?r", answers, re.IGNORECASE), one.said
