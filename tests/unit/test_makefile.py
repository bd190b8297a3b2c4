"""What `make` does to a checkout's environment, with a Python that installs nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE = """#!/bin/sh
case "$1 $2" in
  "-m venv") sleep 0.2; mkdir -p .venv/bin; cp "$0" .venv/bin/python; echo venv >> log;;
  "-m pip") echo begin >> log; sleep 0.2; echo end >> log;;
  "-m meshnet_cli.demo") echo demo >> log;;
  *) exec REAL "$@";;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that `make` reads, and a Python that notes what it is asked to install."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python"
    python.write_text(FAKE.replace("REAL", sys.executable))
    python.chmod(0o755)
    return tmp_path


def make(checkout: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.Popen(
        ["make", *arguments], cwd=checkout, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_two_first_runs_at_once_install_once_and_one_after_the_other(checkout: Path) -> None:
    runs = [make(checkout, f"PYTHON={checkout / 'python'}", "demo") for _ in range(2)]
    said = [run.communicate(timeout=60)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    log = (checkout / "log").read_text().split()
    assert [line for line in log if line != "demo"] == ["venv", *["begin", "end"] * 3]
    assert log.count("demo") == 2
    assert any("waiting for another make" in one for one in said)


def test_a_python_that_will_not_do_is_told_with_the_goal_that_was_asked_for(checkout: Path) -> None:
    run = make(checkout, "PYTHON=/no/such/python", "demo")
    said = run.communicate(timeout=60)[0]
    assert run.returncode == 2
    assert "meshnet needs Python 3.11 or newer" in said
    assert "make PYTHON=/path/to/python3.11 demo" in said


def test_help_names_what_there_is(checkout: Path) -> None:
    said = make(checkout).communicate(timeout=60)[0]
    for goal in ("demo", "test", "test-all", "bench", "gpu-check", "lint", "clean"):
        assert f"make {goal}" in said
