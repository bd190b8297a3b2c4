"""Likely mistakes at the command line: one or two lines that say what to do, the exit code, and never a traceback."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator

import pytest
import typer

from meshnet_cli import complaint
from meshnet_cli.main import app
from meshnet_process import run

NOBODY = "http://127.0.0.1:1"
EVERYWHERE = "0.0.0.0"  # noqa: S104


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["trakcer"], 2, r"No such command 'trakcer'.*Did you mean 'tracker'"),
        (["tracker", "--bogus"], 2, r"No such option: --bogus"),
        (["tracker", "--port", "99999"], 2, r"--port"),
        (["tracker", "--port", "http"], 2, r"--port"),
        (["tracker", "--host", "no.such.host.invalid"], 2, r"give an address of this machine"),
        (["node"], 2, r"Missing argument 'MODEL'|Missing option '--layers'"),
        (["node", "smollm2", "--tracker", NOBODY], 2, r"Missing option '--layers'"),
        (["node", "smollm2", "--layers", "0-14"], 2, r"where a tracker is with --tracker URL.*meshnet join TICKET"),
        (["node", "smollm2", "--layers", "14-0", "--tracker", NOBODY], 2, r"write the lower layer first"),
        (["node", "smollm2", "--layers", "all", "--tracker", NOBODY], 2, r"write FIRST-LAST"),
        (["node", "smollm2", "--layers", "0-14", "--tracker", "nowhere"], 2, r"a URL such as http"),
        (["node", "smollm2", "--layers", "0-14", "--tracker", NOBODY], 1, r"start one with `meshnet tracker`"),
        (["node", "m", "--layers", "0", "--tracker", NOBODY, "--dtype", "int3"], 2, r"'auto', 'float32', 'bfloat16'"),
        (["node", "m", "--layers", "0", "--tracker", NOBODY, "--threads", "0"], 2, r"--threads"),
        (["node", "m", "--layers", "0", "--tracker", NOBODY, "--advertise", "me"], 2, r"write it like http://"),
        (["node", "m", "--layers", "0", "--tracker", NOBODY, "--api-port", "8001"], 2, r"--api serves; give both"),
        (["node", "m", "--layers", "0-3", "--memory", "2GiB"], 2, r"--memory is for --layers auto"),
        (["node", "m", "--layers", "auto", "--memory", "much"], 2, r"--memory 'much' is no number of bytes"),
        (["node", "m", "--layers", "auto", "--also", "m@0-3"], 2, r"goes with neither --also nor --max-loaded-shards"),
        (["plan", "m"], 2, r"name the machines: --on gpu:24GiB"),
        (["plan", "m", "--on", "big one"], 2, r"write \[NAME=\]DEVICE:MEMORY"),
        (["plan", "m", "--on", "cpu:1GiB", "--tracker", NOBODY], 2, r"where the mesh of --on-mesh is"),
        (
            ["tracker", "--port", "0", "--registry", "memcached://x"],
            2,
            r"'memcached://x' is not supported; give a Redis",
        ),
        (["tracker", "--port", "0", "--registry", "redis://me:secret@x/y"], 2, r"redis://HOST:PORT/DATABASE"),
        (["gateway", "--tracker", f"{NOBODY},nowhere", "--port", "0"], 2, r"a URL such as http"),
        (["status", "--tracker", "http://[::1"], 2, r"a URL such as http"),
        (["status", "--tracker", "HTTP://10.0.0.5:7400"], 2, r"a URL such as http"),  # not in the clear by a trick
        (["tracker", "--port", "0", "--advertise", "https://"], 2, r"write it like http://"),
        (["chat", "-m", "hi", "--api-key", "one\ntwo"], 2, r"look for a line break in it"),
        (["chat", "-m", "half of one: \udcff"], 2, r"--message is not in this terminal's encoding"),
        (["tracker", "--host", "x" * 70], 2, r"give an address of this machine"),
        (["gateway", "--tracker", NOBODY, "--step-deadline", "nan"], 2, r"--step-deadline"),
        (["up", "~no-such-user/model"], 2, r"no such model folder or file"),
        (["up", "x" * 5000], 2, r"no such model folder or file"),
        (["gateway", "--port", "0"], 2, r"where a tracker is with --tracker URL.*meshnet join TICKET"),
        (["gateway", "--tracker", "https://127.0.0.1:1", "--port", "0"], 2, r"in none: .*meshnet join TICKET"),
        (["tracker", "--host", EVERYWHERE, "--port", "0"], 2, r"meshnet mesh create.*meshnet join TICKET.*--insecure"),
        (["node", "m", "--layers", "0", "--tracker", NOBODY, "--host", EVERYWHERE], 2, r"meshnet mesh create"),
        (["gateway", "--tracker", NOBODY, "--host", EVERYWHERE, "--port", "0"], 2, r"--api-keys-file FILE"),
        (["tracker", "--mesh", "/nonexistent", "--port", "0"], 2, r"--mesh /nonexistent holds no identity"),
        (["tracker", "--mesh", "/nonexistent", "--insecure", "--port", "0"], 2, r"give one of them"),
        (["mesh", "ticket"], 2, r"tickets are made where `meshnet mesh create` was run"),
        (["mesh", "ticket", "--valid", "soon"], 2, r"write it like 30m, 1h or 7d|tickets are made where"),
        (
            ["gateway", "--tracker", NOBODY, "--api-key", "short", "--port", "0"],
            2,
            r"at least 16 .*openssl rand",
        ),
        (["gateway", "--tracker", NOBODY, "--api-keys-file", "/no/file", "--port", "0"], 2, r"cannot be read"),
        (
            ["gateway", "--tracker", NOBODY, "--api-key", "k" * 16, "--no-api-key", "--port", "0"],
            2,
            r"give one of them",
        ),
        (["gateway", "--tracker", NOBODY, "--tls-key", "/no/file", "--port", "0"], 2, r"give both or neither"),
        (["node", "m", "--layers", "0", "--tracker", NOBODY, "--no-api-key"], 2, r"the API that --api serves"),
        (["gateway", "--tracker", "http://192.0.2.1:7400", "--port", "0"], 2, r"not encrypted.*--insecure"),
        (["mesh", "show"], 1, r"this machine is in no mesh"),
        (["join", "nonsense"], 2, r"'nonsense' is no ticket"),
        (["join", "meshnet-eyJ2IjoxLCJ"], 2, r"this ticket is not whole"),
        (["gateway", "--tracker", NOBODY, "--port", "0"], 1, r"start one with `meshnet tracker`"),
        (["up"], 2, r"Missing argument 'MODEL'"),
        (["up", "smollm2", "--splits", "0-14;15-29"], 2, r"write FIRST-LAST"),
        (
            ["up", "smollm2", "--nodes", "3", "--splits", "0-14,15-29"],
            2,
            r"--nodes 3 and --splits with 2 ranges disagree",
        ),
        (["up", "smollm2", "--nodes", "0"], 2, r"--nodes"),
        (["up", "./no/such/folder"], 2, r"no such model folder or file"),
        (["up", "smolm2"], 2, r"'smolm2' is no model: give .* smollm2"),
        (["chat", "--url", "localhost:8000", "-m", "hi"], 2, r"write it like http://"),
        (["chat", "--url", f"{NOBODY}/v1", "-m", "hi"], 1, r"start one with `meshnet up smollm2`"),
        (["chat", "stray"], 2, r"unexpected extra argument"),
        (["status", "--url", f"{NOBODY}/v1"], 1, r"no gateway answers at .*meshnet up smollm2"),
        (["status", "--tracker", NOBODY], 1, r"start one with `meshnet tracker`"),
        (["status", "--tracker", "nowhere"], 2, r"a URL such as http"),
        (["status", "--url", f"{NOBODY}/v1", "--tracker", NOBODY], 2, r"give one of them"),
        (["nodes", "--url", "localhost"], 2, r"write it like http://"),
        (["nodes", "--tracker", NOBODY], 1, r"start one with `meshnet tracker`"),
    ],
)
def test_a_mistake_is_told_with_its_remedy(
    arguments: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint.run(typer.main.get_command(app), arguments) == code
    shown = capsys.readouterr()
    assert re.search(told, shown.err), shown.err
    lines = [line for line in shown.err.splitlines() if not line.startswith("opening ")]
    assert 1 <= len(lines) <= 2
    assert "Traceback" not in shown.err
    assert shown.out == ""


@pytest.fixture(autouse=True)
def _signals_stay() -> Iterator[None]:
    """`up` handles signals from its first moment on; here it runs within the tests' process."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_a_taken_port_is_told_with_its_remedy(taken_port: int) -> None:
    result = run("tracker", "--port", str(taken_port))
    assert result.returncode == 2
    assert f"port {taken_port} on 127.0.0.1 is taken" in result.stderr
    assert "choose another with --port" in result.stderr


def test_bare_meshnet_shows_the_help() -> None:
    result = run()
    assert result.returncode == 2
    for command in ("tracker", "node", "gateway", "up", "chat", "verify"):
        assert re.search(rf"\b{command}\b", result.stdout + result.stderr)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("tracker", "--host --port --mesh --insecure --advertise --no-mdns"),
        ("join", "--machine --mesh"),
        ("mesh ticket", "--tracker --valid --uses --mesh"),
        ("node", "--layers --tracker --host --port --advertise --name --api --api-port --dtype --device --threads"),
        ("node", "--mesh --insecure --api-key --api-keys-file --no-api-key --max-sessions-per-peer"),
        ("gateway", "--tracker --host --port --recovery --step-deadline --speculate --mesh --insecure"),
        ("gateway", "--api-key --api-keys-file --no-api-key --tls-certificate --tls-key"),
        ("up", "--nodes --splits --port --dtype --device --threads --recovery --step-deadline --speculate"),
        ("chat", "--url --message -m --model --temperature"),
        ("node", "--memory"),
        ("plan", "--on --on-mesh --tracker --dtype --prompt --context --json"),
        ("verify", "--splits --tokens --dtype --device --json"),
    ],
)
def test_every_option_is_in_the_help(
    command: str, options: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert complaint.run(typer.main.get_command(app), [*command.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    for option in options.split():
        assert option in shown
