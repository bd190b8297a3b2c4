"""`meshnet up` as people run it: real processes, ready, and nothing left, whatever ends it."""

from __future__ import annotations

import json
import signal
import socket
import urllib.request
from pathlib import Path

import pytest

from meshnet_process import all_gone, run, running, wait_until
from tiny_models import num_layers, save_tiny

LAYERS = num_layers("llama")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny("llama", tmp_path_factory.mktemp("model") / "tiny-llama"))


def get(url: str) -> dict[str, object]:
    with urllib.request.urlopen(url, timeout=10) as response:  # noqa: S310 - our own gateway
        document = json.loads(response.read())
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.long),
        pytest.param(signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_it_serves_and_all_its_children_go_with_it(number: signal.Signals, model: str, tmp_path: Path) -> None:
    with running(tmp_path / "log", "up", model, "--port", "0", "--dtype", "float32") as up:
        url = up.ready()
        assert url.endswith("/v1")
        status = get(f"{url}/meshnet/status")
        nodes = status["nodes"]
        assert isinstance(nodes, list)
        assert [node["node"] for node in nodes] == ["node-1", "node-2"]
        assert get(f"{url}/models")["data"]
        page = f"{url.removesuffix('/v1')}/dashboard\n"
        assert f"dashboard: {page}" in up.output() or "dashboard: not installed" in up.output()
        children = up.children()
        assert len(children) == 4
        code = up.stop(number)
        assert code == (-signal.SIGKILL if number == signal.SIGKILL else 0)
        wait_until(lambda: all_gone(children))


@pytest.mark.long
def test_the_death_of_a_node_ends_it_with_the_nodes_last_words(model: str, tmp_path: Path) -> None:
    with running(tmp_path / "log", "up", model, "--port", "0", "--splits", f"0-1,1-{LAYERS - 1}") as up:
        up.ready()
        children = up.children()
        node = next(child for child in children if "node-2" in child.cmdline())
        node.kill()
        assert up.process.wait(20) == 1
        assert "node-2 was ended by signal 9, as happens where memory runs out" in up.output()
        assert "; all else is stopped" in up.output()
        assert "registered as node-2" in up.output()
        wait_until(lambda: all_gone(children))


@pytest.mark.long
def test_a_node_that_cannot_start_ends_it(model: str, tmp_path: Path) -> None:
    with running(tmp_path / "log", "up", model, "--port", "0", "--device", "cuda:99") as up:
        assert up.process.wait(90) == 1
        assert "ended with exit code 2" in up.output()
        assert "device 'cuda:99'" in up.output()


def test_a_taken_port_is_refused_as_the_gateway_refuses_it(model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        refused = run("up", model, "--port", str(port))
    assert refused.returncode == 2
    assert (
        f"port {port} on 127.0.0.1 is taken, perhaps by another meshnet; choose another with --port" in refused.stderr
    )
    assert "Traceback" not in refused.stderr


def test_mistakes_are_told_before_anything_is_started(model: str) -> None:
    gap = run("up", model, "--splits", f"0-1,3-{LAYERS - 1}")
    assert gap.returncode == 2
    assert f"--splits leave out layers 2 of 0-{LAYERS - 1}" in gap.stderr
    beyond = run("up", model, "--nodes", "99")
    assert beyond.returncode == 2
    assert f"can be cut into 1 to {LAYERS} nodes, not 99" in beyond.stderr
    for wrong in (gap, beyond):
        assert "Traceback" not in wrong.stderr
