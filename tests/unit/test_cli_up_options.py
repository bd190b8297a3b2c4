"""What `meshnet up` can be told: all that its nodes and its gateway can, but what means nothing on one machine."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from meshnet_cli import up
from meshnet_cli.main import app
from meshnet_cli.settings import settings_of
from meshnet_core.errors import InvalidInputError

NOT_FOR_UP = {
    "node": {
        **dict.fromkeys(
            ("layers", "also", "max-loaded-shards", "memory"), "what each node holds: --nodes and --splits"
        ),
        **dict.fromkeys(("name", "tracker"), "its own parts find each other"),
        **dict.fromkeys(("host", "advertise", "mesh", "insecure"), "none but this machine dials its parts"),
        **dict.fromkeys(("api", "api-port", "api-keys-file", "no-api-key"), "it has a gateway in a process of its own"),
        "drain-grace": "all nodes leave together, so that there is nowhere to move to",
        "max-sessions-per-peer": "there is one gateway",
    },
    "gateway": {
        "tracker": "its own parts find each other",
        **dict.fromkeys(("host", "mesh", "insecure", "mdns"), "it serves this machine alone"),
        **dict.fromkeys(("tls-certificate", "tls-key"), "it serves this machine alone"),
        **dict.fromkeys(("api-keys-file", "no-api-key"), "keys come from MESHNET_API_KEY; without one all may ask"),
    },
}


def keys_of(command: str) -> set[str]:
    return {setting.key for setting in settings_of(typer.main.get_command(app)) if setting.command == command}


@pytest.mark.parametrize("command", NOT_FOR_UP)
def test_it_takes_every_option_of_its_parts_but_those_that_mean_nothing_there(command: str) -> None:
    lacking = keys_of(command) - keys_of("up")
    assert lacking == set(NOT_FOR_UP[command]), f"give it to `meshnet up` too, or say here why not: {lacking}"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What would be started, once something would be."""
    found: dict[str, Any] = {}

    def take(*arguments: Any, **_: Any) -> None:
        found["node"], found["threads"], found["gateway"] = arguments[4:7]

    monkeypatch.setattr(up, "_up", take)
    monkeypatch.setattr(up, "stop_on_signals", lambda: None)
    return found


def test_it_hands_on_what_it_is_given(started: dict[str, Any]) -> None:
    of_nodes = ["--dtype", "bfloat16", "--quantize", "int8", "--device", "cpu", "--cache-bytes", "1000"]
    of_nodes += ["--max-sessions", "3", "--session-ttl", "7.5", "--no-prefix-reuse"]
    of_gateway = ["--recovery", "exact", "--step-deadline", "9", "--speculate", "2", "--no-dashboard"]
    of_gateway += ["--traces", "otlp://127.0.0.1:4318"]
    of_both = ["--wire", "http"]
    result = CliRunner().invoke(app, ["up", "m", "--threads", "3", *of_nodes, *of_gateway, *of_both])
    assert result.exit_code == 0, result.exception
    assert set(started["node"]) >= {*of_nodes, *of_both}
    assert set(started["gateway"]) >= {*of_gateway, *of_both}
    assert started["threads"] == 3


def test_traces_to_nowhere_are_refused_before_anything_is_started(started: dict[str, Any]) -> None:
    result = CliRunner().invoke(app, ["up", "m", "--traces", "nowhere"])
    assert isinstance(result.exception, InvalidInputError)
    assert "--traces 'nowhere' is no address of a collector" in str(result.exception)
    assert not started
