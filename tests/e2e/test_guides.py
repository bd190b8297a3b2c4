"""The pages of the docs: each command that stands on one is typed there, but for those that have an excuse."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from documents import ROOT, blocks, typed_blocks
from guide_scenes import EXCUSES, SCENES, STAND_INS, prepare, typed_pages
from typist import Typist, typist

pytestmark = [pytest.mark.long, pytest.mark.real_model, pytest.mark.timeout(2400)]


@pytest.mark.parametrize("page", [*typed_pages()])
def test_the_commands_of_a_page_do_what_it_says(page: str, tmp_path: Path) -> None:
    scene = SCENES[page]
    if any("redis" in line for step in scene.steps for _, line in step.before) and not shutil.which("redis-server"):
        pytest.skip("no redis-server on this machine (Debian: apt-get install redis-server)")
    with typist(tmp_path, excused=EXCUSES, stand_ins=STAND_INS) as one:
        prepare(one.folder, scene)
        for step, block in zip(scene.steps, typed_blocks((ROOT / page).read_text(encoding="utf-8")), strict=True):
            if step.anew:
                one.look()
                one.stop()
            for host, line in step.before:
                one.type(line, host)
            one.type_block(block, step.host, step.others)
        for program in blocks(ROOT / page, "python"):
            run_program(one, program)
        one.look()
        for line, text in one.said:
            if line.startswith("curl") and '"stream": true' not in line:
                json.loads(text)
        if page == "docs/guides/clients.md":
            assert one.said[1][1].endswith("data: [DONE]")


def run_program(one: Typist, program: str) -> None:
    """A page's program in Python, on the host that runs a mesh; nothing where its library is not installed."""
    imported = re.findall(r"^(?:from|import) (\w+)", program, re.MULTILINE)
    if all(importlib.util.find_spec(name) for name in imported):  # the rest is test_api_clients.py's
        (one.folder / "program.py").write_text(program)
        one.type("python program.py", "kitchen")
        assert one.said[-1][1]
