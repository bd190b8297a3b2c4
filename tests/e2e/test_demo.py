"""The demo with the real model: an answer, what happened, and nothing left; Ctrl-C included."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import smollm2
from meshnet_process import all_gone, wait_until

pytestmark = [pytest.mark.long, pytest.mark.real_model]

DEMO = [sys.executable, "-m", "meshnet_cli.demo", "--prompt", "What is the Moon?"]


@pytest.fixture(scope="module", autouse=True)
def _shipped() -> None:
    smollm2.gguf_path()


def test_it_answers_and_tells_what_happened(tmp_path: Path) -> None:
    result = subprocess.run(
        DEMO,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert result.returncode == 0, result.stderr
    shown = result.stdout
    answer = shown.partition("> What is the Moon?")[2].partition("What happened")[0]
    assert "Earth" in answer
    # Below float32 rounding depends on which steps carried drafts, and with it where a small model finds an end.
    assert re.search(r"answer +\d+ tokens, (ended by the model|cut at the limit of tokens)", shown)
    assert re.search(r"first token +after [\d.]+ s", shown)
    assert re.search(r"[\d.]+ tokens/s over the first 50, [\d.]+ over the last 50", shown)
    assert re.search(r"bytes per step +4 into node-1, (1,152|2,304) into node-2", shown)
    assert re.search(r"session +s-[0-9a-f]{32}, one id, seen by node-1 and node-2", shown)
    for node, layers in (("node-1", "0-14"), ("node-2", "15-29")):
        held = rf"{node} +holds layers {layers} in [\w+]+; ran layers {layers} for \d+ positions \(1 prefill, \d+ dec"
        assert re.search(held, shown)
    states = re.findall(r"state ([\d,]+) bytes", shown)
    assert len(states) == 2
    assert all(int(state.replace(",", "")) > 100_000 for state in states)
    assert list(tmp_path.glob("meshnet-*")) == []  # no logs of a run that went well


def test_ctrl_c_stops_everything(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        demo = subprocess.Popen([*DEMO, "--max-tokens", "2000"], stdout=file, stderr=subprocess.STDOUT)
    wait_until(lambda: "> What is the Moon?" in log.read_text(), 280)
    children = psutil.Process(demo.pid).children(recursive=True)
    assert len(children) == 4
    demo.send_signal(signal.SIGINT)
    assert demo.wait(20) == 0
    assert all_gone(children)
    assert "Traceback" not in log.read_text()
