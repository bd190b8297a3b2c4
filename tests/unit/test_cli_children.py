"""Child processes: ready, progress, an early death, and the end of all of them."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from meshnet_cli.children import Child, Children
from meshnet_cli.complaint import CommandFailedError

PYTHON = (sys.executable, "-c")
READY = "print('ready http://127.0.0.1:7', flush=True); import time; time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}"


def test_a_child_is_ready_when_it_says_so_and_gone_after_the_block(tmp_path: Path) -> None:
    with Children(tmp_path, program=PYTHON) as children:
        child = children.start("node 1", [READY])
        children.wait_ready(child, timeout_s=20)
        assert child.url == "http://127.0.0.1:7"
        assert child.process.poll() is None
    assert child.process.poll() == -signal.SIGTERM


def test_lines_are_told_whole_and_the_ready_line_is_not(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []

    def on_line(child: Child, line: str) -> None:
        told.append((child.name, line))

    with Children(tmp_path, on_line, program=PYTHON) as children:
        children.wait_ready(
            children.start("a", [f"import sys; sys.stderr.write('one\\ntwo\\n'); {READY}"]), timeout_s=20
        )
    assert told == [("a", "one"), ("a", "two")]


def test_an_early_death_is_told_with_the_last_lines_and_takes_the_rest_along(tmp_path: Path) -> None:
    with Children(tmp_path, program=PYTHON) as children:
        other = children.start("other", [READY])
        dying = children.start("dying", ["print('no room for layers 3-5'); raise SystemExit(7)"])
        with pytest.raises(CommandFailedError) as caught:
            children.wait_ready(other, dying, timeout_s=20)
    assert "dying ended with exit code 7" in caught.value.message
    assert "no room for layers 3-5" in caught.value.message
    assert str(dying.log) in caught.value.message
    assert other.process.poll() is not None


def test_a_killed_child_is_told_by_its_signal(tmp_path: Path) -> None:
    with Children(tmp_path, program=PYTHON) as children:
        child = children.start("a", [READY])
        children.wait_ready(child, timeout_s=20)
        child.process.kill()
        child.process.wait()
        with pytest.raises(CommandFailedError, match="a was ended by signal 9"):
            children.look()


def test_who_is_not_ready_in_time_is_named(tmp_path: Path) -> None:
    with (
        Children(tmp_path, program=PYTHON) as children,
        pytest.raises(CommandFailedError, match=r"starting slow took longer than 0\.2 s"),
    ):
        children.wait_ready(children.start("slow", ["import time; time.sleep(60)"]), timeout_s=0.2)


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshnet_cli.children.GRACE_S", 0.2)
    began = time.monotonic()
    with Children(tmp_path, program=PYTHON) as children:
        child = children.start("stubborn", [STUBBORN])
        children.wait_ready(child, timeout_s=20)
    assert child.process.poll() == -signal.SIGKILL
    assert time.monotonic() - began < 20
