"""`meshnet status` and `meshnet nodes`: what they tell of a mesh, asked of a gateway or of a tracker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from announcements import node
from app_thread import serving_app
from meshnet_cli import nodes, options, status
from meshnet_cli.main import app
from meshnet_core.clock import SystemClock
from meshnet_core.errors import InvalidInputError
from meshnet_core.membership import NodeInfo
from meshnet_core.tracker_client import TrackerClient
from meshnet_tracker.directory import Directory
from meshnet_tracker.server import create_app, new_doorkeeper
from scripted_gateway import ScriptedGateway, serving


def told(*found: dict[str, Any], missing: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    model = {
        "name": "m",
        "fingerprint": "f1",
        "num_layers": 30,
        "complete": not missing,
        "missing_layers": list(missing),
        "route": None if missing else "a[0-14] -> b[15-29]",
        "expected_ms_per_token": None if missing else 40.0,
    }
    return {"models": [model], "nodes": list(found), "trackers": [], "degraded": [], **more}


def one(name: str, layers: str, **changes: Any) -> dict[str, Any]:
    shard = {"model": "m", "layers": layers, "dtype": "float32", "loaded": True, "decode_ms": 1.25}
    fields = {"node": name, "url": f"http://{name}:7410", "device": "cpu", "version": "0.1.0", "layers": [shard]}
    return fields | {"draining": False, "answers": True, "sessions": 2, "state_bytes": 3 << 20} | changes


def shown(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == code, result.output
    return result.stdout


def test_the_status_tells_who_holds_what_and_how_fast_it_may_go() -> None:
    text = "\n".join(status.lines(told(one("a", "0-14"), one("b", "15-29", draining=True))))
    assert "m: 30 layers, whole" in text
    assert "0-14  a (cpu, float32)" in text
    assert "about 25.0 tokens/s expected" in text
    assert "b (draining)" in text
    assert "sessions: 2, with 6.0 MiB of state" in text


def test_the_status_tells_gaps_with_what_closes_them_and_what_is_degraded() -> None:
    trackers = [{"url": "http://t:7400", "answers": True, "registry": "unreachable", "nodes": 1}]
    document = told(one("a", "0-14", answers=False), missing=("15-29",), trackers=trackers, degraded=["no Redis"])
    text = "\n".join(status.lines(document))
    assert "layers 15-29 are served by no node" in text
    assert "meshnet node MODEL --layers 15-29" in text
    assert "a (does not answer)" in text
    assert "tracker: http://t:7400 answers, without its registry" in text
    assert "degraded: no Redis" in text


def test_a_node_that_does_not_answer_leaves_a_gap_before_its_lease_has_ended() -> None:
    text = "\n".join(status.lines(told(one("a", "0-14", answers=False), one("b", "10-29"))))
    assert "m: 30 layers, but nobody who holds layers 0-9 answers" in text
    assert "0-14  a (cpu, float32, does not answer)" in text
    assert "meshnet node MODEL --layers 0-9" in text
    assert "expected" not in text


def test_the_status_tells_the_speed_that_was_measured() -> None:
    hops = [{"node": "a", "layers": "0-14"}, {"node": "b", "layers": "15-29"}]
    begins = {"model": "m", "route": [], "completion_tokens": 0, "tokens_per_s": None}
    runs = {"model": "m", "route": hops, "completion_tokens": 41, "tokens_per_s": 8.26}
    latest = {"m": {"completion_tokens": 120, "tokens_per_s": 9.0}}
    gateway = {"active_generations": 2, "running": [runs, begins], "latest": latest, "requests": {"ok": 3}}
    text = "\n".join(status.lines(told(one("a", "0-14"), one("b", "15-29"), gateway=gateway)))
    assert "gateway: 2 answers running; so far 3 ok" in text
    assert "m over a[0-14] -> b[15-29]: 41 tokens, 8.3 tokens/s measured" in text
    assert "m over no route yet: 0 tokens\n" in text
    assert "m, the newest answer: 120 tokens, 9.0 tokens/s measured" in text


def test_models_of_one_name_are_told_apart_by_their_files() -> None:
    document = told(one("a", "0-29"), one("b", "0-29"))
    document["models"] = [document["models"][0] | {"fingerprint": letter * 64} for letter in "ef"]
    for node_of, model in zip(document["nodes"], document["models"], strict=True):
        node_of["layers"] = [node_of["layers"][0] | {"fingerprint": model["fingerprint"]}]
    first, held, _, second, *_ = status.lines(document)
    assert (first, second) == tuple(f"m of the files {letter * 12}: 30 layers, whole" for letter in "ef")
    assert held.split()[1] == "a"


def test_a_mesh_without_nodes_says_how_to_start_one() -> None:
    assert "meshnet node MODEL --layers" in next(status.lines({"models": [], "nodes": []}))


def test_the_nodes_are_rows_with_their_speed_and_memory() -> None:
    other = one("b", "0-3", answers=False)
    other["layers"] = [{"model": "m", "layers": "0-3", "dtype": "float32", "loaded": False, "decode_ms": None}] * 2
    first, second, third = nodes.rows([one("a", "0-14", budget_bytes=1 << 30), other])
    assert first == ("a", "m", "0-14", "cpu", "float32", "1.250", "2", "3.0 MiB of 1.0 GiB", "serving")
    assert second[2:6] == ("0-3 (not in memory)", "cpu", "float32", "not measured")
    assert (second[-1], third[0], third[-1]) == ("does not answer", "", "")


def test_both_ask_the_gateway_that_is_named() -> None:
    document = told(one("a", "0-29"))
    with serving(ScriptedGateway([], status=document)) as gateway:
        assert json.loads(shown("status", "--url", gateway.url, "--json")) == document
        assert json.loads(shown("nodes", "--url", gateway.url, "--json")) == document["nodes"]
        assert "m: 30 layers, whole" in shown("status", "--url", gateway.url)
        assert "1.250" in shown("nodes", "--url", gateway.url)


@pytest.mark.parametrize("by", ["gateway", "port"])
def test_what_only_looks_finds_the_mesh_of_a_machine_in_no_mesh(
    by: str, tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(tracker, node("a", "0-29", url="http://127.0.0.1:1"))
    monkeypatch.setattr(options, "DEFAULT_TRACKER_PORT", int(tracker.rpartition(":")[2]) if by == "port" else 1)
    document = told(one("a", "0-29")) | {"trackers": [{"url": tracker, "answers": True}]}
    with serving(ScriptedGateway([], status=document)) as gateway:
        monkeypatch.setattr(options, "DEFAULT_API_URL", gateway.url if by == "gateway" else "http://127.0.0.1:1/v1")
        model = json.loads(shown("status", "--tracker", tracker, "--json"))["models"][0]["name"]
        assert shown("route", model) == "a[0-29]\n"
        assert "node a joined" in shown("events")
        assert json.loads(shown("doctor", "--json", code=1))["findings"]  # the node's address answers nobody


def test_where_there_is_no_mesh_to_look_at_it_is_asked_where_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "DEFAULT_TRACKER_PORT", 1)
    monkeypatch.setattr(options, "DEFAULT_API_URL", "http://127.0.0.1:1/v1")
    result = CliRunner().invoke(app, ["route", "m"])
    assert isinstance(result.exception, InvalidInputError)
    assert "--tracker URL" in result.exception.message


@pytest.fixture
def tracker() -> Iterator[str]:
    with serving_app(create_app(Directory(SystemClock()), new_doorkeeper())) as url:
        yield url


def announce(url: str, info: NodeInfo) -> None:
    async def go() -> None:
        client = TrackerClient(url)
        await client.heartbeat(info)
        await client.close()

    asyncio.run(go())


def test_both_ask_the_tracker_that_is_named_and_the_nodes_themselves(tracker: str) -> None:
    assert "no node has registered" in shown("nodes", "--tracker", tracker)
    announce(tracker, node("a", "0-14", url="http://127.0.0.1:1", sessions=3))
    document = json.loads(shown("status", "--tracker", tracker, "--json"))
    assert document["models"][0]["missing_layers"] == ["15-29"]
    (told_of,) = json.loads(shown("nodes", "--tracker", tracker, "--json"))
    assert (told_of["node"], told_of["answers"], told_of["sessions"]) == ("a", False, 3)
