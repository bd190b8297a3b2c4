"""Settings: a flag goes before a variable, a variable before the file, the file before the default."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from meshnet_cli import complaint, lifeline
from meshnet_cli.main import app
from meshnet_cli.settings import SHARED, Setting, defaults_of, settings_of
from meshnet_core.errors import InvalidInputError
from scripted_gateway import ScriptedGateway, serving

NOBODY = "http://127.0.0.1:1"
CHECKED_LATER = {"session-ttl", "drain-grace"}  # see test_cli_session_limits


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHNET_HOME", str(tmp_path))
    return tmp_path


def write(home: Path, text: str) -> Path:
    path = home / "config.toml"
    path.write_text(text)
    return path


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*arguments])
    return result.exit_code, result.stdout, result.stderr


def shown(*arguments: str) -> dict[tuple[str, str], Mapping[str, Any]]:
    code, out, _ = run("config", "--json", *arguments)
    assert code == 0
    return {(row["command"], row["option"]): row for row in json.loads(out)["settings"]}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert complaint.run(typer.main.get_command(app), [*arguments]) == 2
    return capsys.readouterr().err


def test_a_flag_goes_before_a_variable_before_the_file_before_the_default(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> str:
        code = complaint.run(typer.main.get_command(app), ["chat", "-m", "hi", *flag])
        assert code == 1
        return capsys.readouterr().err

    flag: list[str] = []
    write(home, '[all]\nurl = "http://127.0.0.1:3/all"\n')
    assert "127.0.0.1:3/all" in said()
    write(home, '[all]\nurl = "http://127.0.0.1:3/all"\n[chat]\nurl = "http://127.0.0.1:3/chat"\n')
    assert "127.0.0.1:3/chat" in said()
    monkeypatch.setenv("MESHNET_URL", "http://127.0.0.1:2/shared")
    assert "127.0.0.1:2/shared" in said()
    monkeypatch.setenv("MESHNET_CHAT_URL", "http://127.0.0.1:2/own")
    assert "127.0.0.1:2/own" in said()
    flag = ["--url", "http://127.0.0.1:1/flag"]
    assert "127.0.0.1:1/flag" in said()


def test_config_shows_each_setting_with_its_origin(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(home, '[node]\nmax-sessions = 4\n[mesh-create]\nname = "attic"\n')
    monkeypatch.setenv("MESHNET_TRACKER", f"{NOBODY} http://127.0.0.1:2")
    found = shown()
    assert found["node", "max-sessions"]["value"] == 4
    assert found["node", "max-sessions"]["origin"] == f"file {path}"
    assert found["mesh-create", "name"]["value"] == "attic"
    assert found["gateway", "tracker"]["value"] == [NOBODY, "http://127.0.0.1:2"]
    assert found["gateway", "tracker"]["origin"] == "variable MESHNET_TRACKER"
    assert ("gateway", "port") not in found
    everything = shown("--all")
    assert everything["gateway", "port"] == {
        "command": "gateway",
        "option": "port",
        "value": 8000,
        "origin": "default",
        "variables": ["MESHNET_GATEWAY_PORT"],
    }


def test_config_as_people_read_it(home: Path) -> None:
    code, out, _ = run("config")
    assert (code, "config.toml would be read" in out, "--all" in out) == (0, True, True)
    write(home, "[gateway]\nport = 9000\n")
    code, out, _ = run("config")
    assert code == 0
    assert "9000" in out
    assert "MESHNET_GATEWAY_PORT" in out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("port = 1\n", "'port' is in no table"),
        ("[nodes]\nprot = 1\n", "[nodes] has no option 'prot'"),
        ("[nood]\nport = 1\n", "[nood] is no command; did you mean node?"),
        ("[all]\nport = 1\n", "[all] has no option 'port'"),
        ('[gateway]\nport = "http"\n', "[gateway] port = 'http'"),
        ("[gateway]\nport = 99999\n", "[gateway] port = 99999"),
        ('[node]\ndtype = "int3"\n', "'int3' is not one of"),
        ("[up]\nthreads = true\n", "[up] threads = true: write a whole number, not true"),
        ("[up]\nthreads = 2.0\n", "[up] threads = 2.0: write a whole number, without a point"),
        ("[up]\nstep-deadline = true\n", "[up] step-deadline = true: write a number, not true"),
        ("[node]\nname = true\n", "[node] name = true: write a text, not true"),
        ("[node]\nname = 1.5\n", "[node] name = 1.5: write a text, in quotes"),
        ("[node]\nname = []\n", "[node] name = []: write a text, in quotes"),
        ("[node]\ntracker = [true]\n", "[node] tracker = [True]: write a text, not true"),
        ('[up]\ndashboard = "yes"\n', "[up] dashboard = 'yes': write true or false"),
        ("[up]\ndashboard = 0\n", "[up] dashboard = 0: write true or false"),
        ("[gateway\n", "cannot be read"),
        ('[chat]\napi-key = "x"\n', "[chat] has no option 'api-key'"),
    ],
)
def test_a_wrong_file_is_told_by_every_command(
    text: str, told: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(home, text)
    error = refused(capsys, "chat", "-m", "hi")
    assert told in error
    assert len(error.splitlines()) <= 2
    assert "Traceback" not in error


def test_no_number_is_true_or_without_bounds() -> None:
    """Of every option of every command that is a number, in the file and at the command line."""
    group = typer.main.get_command(app)
    found = {}
    for setting in settings_of(group):
        context = setting.owner.make_context(setting.command, [], resilient_parsing=True)

        def read(value: Any, setting: Setting = setting, context: Any = context) -> Any:
            return setting.option.process_value(context, value)

        with suppress(complaint.UsageError):
            if type(read(True)) not in (int, float) or setting.option.multiple:
                continue
            found[setting.command, setting.key] = read
    assert {("up", "threads"), ("gateway", "port"), ("chat", "temperature"), ("node", "drain-grace")} <= set(found)
    for (command, key), read in found.items():
        with pytest.raises(InvalidInputError, match=rf"^\[{command}\] {key} = true: write a (whole )?number"):
            defaults_of(group, {command: {key: True}})
        for text in ("true", "nan", "inf"):
            if key not in CHECKED_LATER or text == "true":
                with pytest.raises(complaint.UsageError):
                    read(text)


def test_a_number_may_be_written_where_a_text_is_read() -> None:
    group = typer.main.get_command(app)
    document = {"up": {"cache-bytes": 1000000, "speculate": 4, "port": "9000", "session-ttl": 30}}
    assert defaults_of(group, document)["up"] == {
        "cache_bytes": 1000000,
        "speculate": 4,
        "port": "9000",
        "session_ttl": 30,
    }


def test_a_wrong_file_is_among_the_doctors_findings(home: Path) -> None:
    write(home, "[nood]\nport = 1\n")
    code, out, _ = run("doctor", "--device", "cpu")
    assert code == 1
    assert "[nood] is no command" in out


def test_a_file_that_is_named_is_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MESHNET_CONFIG", "/no/such.toml")
    assert "MESHNET_CONFIG=/no/such.toml is no file" in refused(capsys, "chat", "-m", "hi")


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MESHNET_GATEWAY_PORT", "http")
    assert "MESHNET_GATEWAY_PORT" in refused(capsys, "gateway")


def test_the_processes_of_up_take_no_settings(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home, f'[all]\ntracker = "{NOBODY}"\n')
    monkeypatch.setenv("MESHNET_GATEWAY_PORT", "9000")
    monkeypatch.setenv(lifeline.VARIABLE, "3")
    assert shown() == {}


def test_what_was_typed_goes_before_a_setting_that_it_does_not_go_with(home: Path) -> None:
    write(home, f'[all]\ntracker = "{NOBODY}"\n')
    with serving(ScriptedGateway([], status={"models": [], "nodes": []})) as gateway:
        assert run("status", "--url", gateway.url)[0] == 0
    assert "name the machines" in str(CliRunner().invoke(app, ["plan", "m"]).exception)


def test_every_option_has_a_variable_of_its_own_and_it_is_in_the_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    group = typer.main.get_command(app)
    names = [setting.names[0] for setting in settings_of(group)]
    assert len(names) == len(set(names)) > 60
    assert {setting.key for setting in settings_of(group)} >= SHARED
    for command in ("node", "gateway"):
        out = run(command, "--help")[1]
        for setting in settings_of(group):
            if setting.command == command:
                assert setting.names[0] in out


def test_the_defaults_of_an_empty_file_are_none() -> None:
    assert defaults_of(typer.main.get_command(app), {}) == {}


def test_what_the_guide_shows_is_taken() -> None:
    text = (Path(__file__).parents[2] / "docs" / "guides" / "settings.md").read_text("utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    found = defaults_of(typer.main.get_command(app), tomllib.loads(example))
    assert (found["node"]["max_sessions"], found["gateway"]["dashboard"]) == (4, False)
    assert found["mesh"]["ticket"]["valid"] == "30m"
    assert found["up"]["quantize"] == found["node"]["quantize"] == "int4"
