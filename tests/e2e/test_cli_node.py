"""`meshnet node`, `tracker` and `gateway` by hand, as on several machines."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from announcements import node
from meshnet_core.tracker_client import TrackerClient
from meshnet_process import run, running, wait_until
from tiny_models import num_layers, save_tiny

LAYERS = num_layers("llama")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny("llama", tmp_path_factory.mktemp("model") / "tiny-llama"))


@pytest.fixture(scope="module")
def tracker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(tmp_path_factory.mktemp("tracker") / "log", "tracker", "--port", "0") as process:
        yield process.ready()


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:  # noqa: S310 - our own processes
        return json.loads(response.read())


def registered(tracker: str) -> list[str]:
    return [node["node_id"] for node in get(f"{tracker}/v1/snapshot")["nodes"]]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_node_that_is_told_to_stop_leaves_the_tracker(
    number: signal.Signals, model: str, tracker: str, tmp_path: Path
) -> None:
    arguments = ["--tracker", tracker, "--port", "0", "--name", "leaver"]
    with running(tmp_path / "log", "node", model, "--layers", "0-1", *arguments) as node:
        url = node.ready()
        assert registered(tracker) == ["leaver"]
        assert get(f"{url}/healthz")["shards"][0]["stop"] == 2
        assert node.stop(number) == 0
    assert registered(tracker) == []


def test_following_events_ends_at_ctrl_c_without_a_traceback(tracker: str, tmp_path: Path) -> None:
    async def announce() -> None:
        client = TrackerClient(tracker)
        await client.heartbeat(node("passer-by", "0-1"))
        await client.leave("passer-by")
        await client.close()

    asyncio.run(announce())
    with running(tmp_path / "log", "events", "--tracker", tracker, "--follow", "--json") as following:
        wait_until(lambda: '"passer-by"' in following.output(), 90)
        assert following.stop(signal.SIGINT, 60) == 130
        assert "Traceback" not in following.output()


@pytest.mark.long
def test_a_node_with_an_api_is_a_whole_mesh_of_one(model: str, tracker: str, tmp_path: Path) -> None:
    arguments = ["--tracker", tracker, "--port", "0", "--api", "--api-port", "0"]
    with running(tmp_path / "log", "node", model, "--layers", f"0-{LAYERS - 1}", *arguments) as node:
        node.ready()
        wait_until(lambda: "\napi http" in node.output())
        api = node.output().partition("\napi ")[2].split()[0]
        assert [served["id"] for served in get(f"{api}/models")["data"]] == ["tiny-llama"]
        assert node.stop() == 0
    assert registered(tracker) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["./no/such/folder", "--layers", "0-1"], "no such model folder or file"),
        (["MODEL", "--layers", "0-99"], f"0-{LAYERS - 1}"),
        (["MODEL", "--layers", "0", "--device", "tpu"], "device 'tpu' is unknown; write auto, cpu, cuda"),
        (["MODEL", "--layers", "0", "--port", "TAKEN"], "is taken, perhaps by another meshnet"),
        (["MODEL", "--layers", "0", "--api", "--api-port", "TAKEN"], "choose another with --api-port"),
    ],
)
def test_a_mistake_that_only_the_model_or_the_machine_shows(
    arguments: list[str], told: str, model: str, tracker: str
) -> None:
    taken = tracker.rpartition(":")[2]
    given = [{"MODEL": model, "TAKEN": taken}.get(argument, argument) for argument in arguments]
    result = run("node", *given, "--tracker", tracker)
    assert told in result.stderr
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("meshnet: ")]) == 1


@pytest.mark.long
def test_a_gateway_serves_what_there_is(tracker: str, tmp_path: Path) -> None:
    with running(tmp_path / "log", "gateway", "--tracker", tracker, "--port", "0") as gateway:
        url = gateway.ready()
        assert get(f"{url}/models")["data"] == []
        result = run("chat", "--url", url, "-m", "hi")
        assert result.returncode == 1
        assert "serves no complete model yet" in result.stderr
        assert gateway.stop() == 0


@pytest.mark.long
def test_what_is_no_tracker_is_told(tracker: str, tmp_path: Path) -> None:
    with running(tmp_path / "log", "gateway", "--tracker", tracker, "--port", "0") as gateway:
        wrong = gateway.ready().removesuffix("/v1")
        result = run("gateway", "--tracker", wrong, "--port", "0")
    assert result.returncode == 1
    assert "no meshnet tracker" in result.stderr
