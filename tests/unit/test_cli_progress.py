"""Progress on a terminal and elsewhere."""

from __future__ import annotations

import pytest

from meshnet_cli.progress import progress_reporter, read_line


def test_off_a_terminal_there_is_a_line_for_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_reporter() as report:
        for done in range(101):
            report("", "loading layers 0-14", done, 100)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"loading layers 0-14, {percent} %" for percent in range(0, 101, 10)]


def test_lines_begin_again_with_the_next_piece_of_work(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_reporter() as report:
        for what in ("converting", "loading"):
            for done in (0, 50, 100):
                report("", what, done, 100)
    assert [line.split(",")[0] for line in capsys.readouterr().err.splitlines()] == ["converting"] * 3 + ["loading"] * 3


def test_a_line_is_read_back_as_its_parent_needs_it(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_reporter() as report:
        report("", "loading layers 0-14 of a, b", 3, 7)
    assert read_line(capsys.readouterr().err.strip()) == ("loading layers 0-14 of a, b", 42)


@pytest.mark.parametrize("line", ["", "ready http://127.0.0.1:1", "12 %", "loading, x %", "INFO a, 3 % of b"])
def test_other_lines_are_no_progress(line: str) -> None:
    assert read_line(line) is None


def test_nothing_to_do_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_reporter() as report:
        report("node-1", "loading", 0, 0)
    assert capsys.readouterr().err == "node-1: loading, 100 %\n"


def test_on_a_terminal_there_are_bars_that_go(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress_reporter() as report:
        report("node-1", "loading", 1, 2)
        report("node-1", "loading", 2, 2)
    assert "node-1: loading, " not in capsys.readouterr().err
