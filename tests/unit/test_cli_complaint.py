"""What a person sees when something went wrong."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import typer

from meshnet_cli import complaint
from meshnet_core.errors import (
    InvalidInputError,
    LayersUnavailableError,
    MeshnetError,
    ModelNotFoundError,
    TrackerUnreachableError,
    UnsupportedModelError,
)


def command(error: BaseException | None) -> Any:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def fail(number: int = 0) -> None:
        if error is not None:
            raise error

    return typer.main.get_command(app)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidInputError("layers are wrong; write 0-20"), 2),
        (ModelNotFoundError("no such model; give a folder"), 2),
        (UnsupportedModelError("zamba2 cannot be cut"), 2),
        (TrackerUnreachableError("no tracker; start one"), 1),
        (LayersUnavailableError("layers 3-5 are missing"), 1),
        (complaint.CommandFailedError("node-1 ended"), 1),
    ],
)
def test_errors_of_the_tree_are_one_line_and_an_exit_code(
    error: MeshnetError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint.run(command(error), []) == code
    assert capsys.readouterr().err == f"meshnet: {error.message}\n"


def test_an_unexpected_error_is_no_traceback_but_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint.run(command(RuntimeError("boom")), []) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("meshnet: unexpected RuntimeError: boom\n")
    assert "MESHNET_DEBUG=1" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("error", [RuntimeError("boom"), InvalidInputError("wrong")])
def test_debugging_lets_the_traceback_through(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_DEBUG", "1")
    with pytest.raises(type(error)):
        complaint.run(command(error), [])


@pytest.mark.parametrize("arguments", [["--bogus"], ["--number", "x"], ["stray"]])
def test_a_usage_error_is_two_lines_that_point_at_the_help(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint.run(command(None), arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[1] == "Try: meshnet --help"


def test_variables_and_reasons_are_told_as_people_write_them() -> None:
    said = "'--quantize' (env var: '['MESHNET_UP_QUANTIZE', 'MESHNET_QUANTIZE']'): Value error, 'x' is not one of 'a'"
    told = "'--quantize' (env var: 'MESHNET_UP_QUANTIZE' or 'MESHNET_QUANTIZE'): 'x' is not one of 'a'"
    assert complaint.plain_words(said) == told
    assert complaint.plain_words("'--port' (env var: 'MESHNET_X')") == "'--port' (env var: 'MESHNET_X')"


@pytest.mark.parametrize("name", ["torch", "gguf", "safetensors.torch"])
def test_what_only_nodes_need_is_told_with_how_to_get_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint.run(command(ModuleNotFoundError(f"No module named {name!r}", name=name)), []) == 1
    shown = capsys.readouterr().err
    assert f"this needs {name}" in shown
    assert "pip install 'meshnet[node]'" in shown
    assert "bug" not in shown


def test_success_is_0_and_an_interrupt_130() -> None:
    assert complaint.run(command(None), []) == 0
    assert complaint.run(command(KeyboardInterrupt()), []) == 130


def test_a_reader_that_has_seen_enough_is_no_bug() -> None:
    code = "import sys; from meshnet_cli.main import main; main(['--help'])"
    result = subprocess.run(
        ["/bin/sh", "-c", f'"$0" -c "{code}" | true; exit 0', sys.executable],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "unexpected" not in result.stderr
    assert "Traceback" not in result.stderr
