"""The tracker's HTTP API over a real socket: what it answers, and what it refuses and how."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from announcements import node
from meshnet_core.clock import ManualClock
from meshnet_core.demand import Demand
from meshnet_core.errors import InvalidInputError, LayersUnavailableError, ModelNotFoundError, UnknownNodeError
from meshnet_core.layer_range import LayerRange
from meshnet_core.membership import NodeInfo
from meshnet_core.placeable import Wish
from meshnet_core.route import Route
from meshnet_node.registration import Registration
from meshnet_tracker import directory as directory_module
from meshnet_tracker.directory import Directory
from meshnet_tracker.events import Joined, LoggedEvent
from meshnet_tracker.placement_desk import PlacementDesk
from meshnet_tracker.server import MAX_BODY, create_app
from tracker_on_socket import Tracker, tracker_on_socket
from web_on_socket import serving


@pytest.fixture
async def tracker() -> AsyncIterator[Tracker]:
    async for running in tracker_on_socket():
        yield running


async def test_nodes_register_are_seen_and_make_a_route(tracker: Tracker) -> None:
    first, second = node("a", "0-19"), node("b", "10-29", version="0.2.0")
    assert await tracker.client.heartbeat(first) == 15.0
    assert await tracker.client.heartbeat(second) == 15.0
    assert (await tracker.client.snapshot()).nodes == (first, second)
    route = await tracker.client.route("m")
    assert str(route) == "a[0-19] -> b[20-29]"
    assert route.hops[1].version == "0.2.0"


async def test_a_registered_node_is_routed_to_until_it_stops(tracker: Tracker) -> None:
    keeper = Registration(tracker.client, lambda: node("a", "0-29"))
    await keeper.beat()
    assert str(await tracker.client.route("m")) == "a[0-29]"
    keeper.start()
    await asyncio.sleep(0)
    await keeper.stop()
    with pytest.raises(ModelNotFoundError):
        await tracker.client.route("m")


def test_the_documented_examples_are_what_is_read_and_written() -> None:
    page = Path(__file__).parents[2] / "docs" / "tracker-api.md"
    announced, told, asked, routed, error = map(
        json.loads, re.findall(r"```json\n(.*?)```", page.read_text(), re.DOTALL)
    )
    assert NodeInfo.from_wire(announced).to_wire() == announced
    assert Route.from_wire(routed).to_wire() == routed
    assert set(told["events"][0]) == set(LoggedEvent(1, 0.0, Joined(node("a"))).to_wire())
    assert set(asked) == {"model", "excluded", "fingerprint", "protocol_min", "protocol_max"}
    assert set(error["error"]) == {"code", "message"}


async def test_what_cannot_be_planned_comes_back_as_the_error_it_was(tracker: Tracker) -> None:
    await tracker.client.heartbeat(node("a", "0-14"))
    await tracker.client.heartbeat(node("b", "15-29"))
    with pytest.raises(LayersUnavailableError, match="b holds 15-29 but is excluded"):
        await tracker.client.route("m", frozenset({"b"}))
    with pytest.raises(LayersUnavailableError, match="no node serves m with fingerprint f9"):
        await tracker.client.route("m", fingerprint="f9")
    with pytest.raises(ModelNotFoundError, match="the mesh serves m"):
        await tracker.client.route("other")
    status, body = await tracker.raw("POST", "/v1/route", json={"model": "other"})
    assert status == 404
    assert body == {"error": {"code": "model_not_found", "message": "no node serves 'other'; the mesh serves m"}}


async def test_a_node_leaves_once_and_only_by_its_own_boot(tracker: Tracker) -> None:
    await tracker.client.heartbeat(node("a"))
    with pytest.raises(UnknownNodeError):
        await tracker.client.leave("a", boot="b-other")
    await tracker.client.leave("a", boot="b-a")
    assert (await tracker.client.snapshot()).nodes == ()
    with pytest.raises(UnknownNodeError):
        await tracker.client.leave("a")


async def test_a_replaced_process_is_told_so(tracker: Tracker) -> None:
    await tracker.client.heartbeat(node("a", boot="b-1"))
    await tracker.client.heartbeat(node("a", boot="b-2"))
    with pytest.raises(InvalidInputError, match="another process has registered as node a"):
        await tracker.client.heartbeat(node("a", boot="b-1"))


async def test_health_and_metrics_tell_what_happened(tracker: Tracker) -> None:
    await tracker.client.heartbeat(node("a", "0-29"))
    await tracker.client.route("m")
    await tracker.raw("POST", "/v1/route", json={"model": "other"})
    await tracker.raw("GET", "/nowhere")
    assert await tracker.raw("GET", "/readyz") == (200, {"status": "ready"})
    status, health = await tracker.raw("GET", "/healthz")
    assert (status, health["status"], health["nodes"]) == (200, "ok", 1)
    assert await tracker.metric("meshnet_tracker_nodes ") == 1
    assert await tracker.metric("meshnet_tracker_routes_planned_total ") == 1
    assert await tracker.metric('meshnet_tracker_refusals_total{code="model_not_found"}') == 1
    assert await tracker.metric('meshnet_tracker_refusals_total{code="invalid_input"}') == 1
    tracker.clock.advance(15)
    assert await tracker.metric("meshnet_tracker_nodes ") == 0
    assert await tracker.metric("meshnet_tracker_leases_expired_total ") == 1


async def test_a_death_is_logged_though_nobody_asks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="meshnet_tracker.server")
    clock = ManualClock()
    directory = Directory(clock, lease_s=0.01)
    expired = asyncio.Event()
    async with serving(create_app(directory)):
        directory.subscribe(lambda _: expired.set())
        directory.announce(node("a"))
        expired.clear()
        clock.advance(1)
        await asyncio.wait_for(expired.wait(), 30)
    assert [record.getMessage() for record in caplog.records][-1] == (
        "node a was not heard of for 1.0 s: its lease has expired"
    )


def announcement(**changes: Any) -> dict[str, Any]:
    return node("a", "0-29").to_wire() | changes


def with_shard(**changes: Any) -> dict[str, Any]:
    document = announcement()
    document["shards"] = [document["shards"][0] | changes]
    return document


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ([], "is a JSON object, not list"),
        ({}, "protocol_min is missing"),
        (announcement(node_id="b"), "the path names node a, but its announcement node b"),
        (announcement(node_id="a b"), "node id must be 1 to 64 characters"),
        (announcement(url="ftp://a"), "a node's url begins with http"),
        (announcement(url="http://a\nfake log line"), "printable"),
        (announcement(boot=None), "boot must be 1 to 64 characters"),
        (announcement(sessions="3"), "sessions must be a whole number"),
        (announcement(sessions=-1), "sessions must be a whole number"),
        (announcement(queued=True), "queued must be a whole number"),
        (announcement(queued=10**400), "queued must be a whole number"),
        (announcement(state_bytes=1.5), "state_bytes must be a whole number"),
        (announcement(draining="false"), "draining must be true or false"),
        (announcement(protocol_min=2, protocol_max=1), "protocol_max must be a whole number from 2"),
        (announcement(shards={}), "shards must be a list"),
        (announcement(shards=[3]), "a shard is a JSON object"),
        (with_shard(stop=31), "reach beyond the model's 30 layers"),
        (with_shard(start=30), "is empty or negative"),
        (with_shard(dtype="int3"), "unknown dtype 'int3'"),
        (with_shard(model=""), "model must be 1 to 256 printable characters"),
        (with_shard(fingerprint="f" * 257), "fingerprint must be 1 to 256"),
        (with_shard(decode_ms=-1), "decode_ms must be null or a number"),
        (with_shard(decode_ms="fast"), "decode_ms must be null or a number"),
        (with_shard(hidden_size=0), "hidden_size must be a whole number from 1"),
    ],
)
async def test_a_wrong_announcement_is_refused_with_its_reason(tracker: Tracker, document: Any, reason: str) -> None:
    status, body = await tracker.raw("PUT", "/v1/nodes/a", json=document)
    assert (status, body["error"]["code"]) == (400, "invalid_input")
    assert reason in body["error"]["message"]
    assert await tracker.client.heartbeat(node("a", "0-29")) == 15.0


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ([], "a request for a route is a JSON object"),
        ({}, "model is missing"),
        ({"model": 3}, "model must be 1 to 256"),
        ({"model": "m", "excluded": "a"}, "excluded must be a list"),
        ({"model": "m", "excluded": ["a", 3]}, "an excluded node's id must be"),
        ({"model": "m", "excluded": ["a"] * 1001}, "at most 1000 items"),
        ({"model": "m", "fingerprint": None}, "fingerprint must be"),
        ({"model": "m", "protocol_min": "1"}, "protocol_min must be"),
        ({"model": "m", "protocol_min": 9, "protocol_max": 8}, "protocol_max must be a whole number from 9"),
        ({"model": "m", "protocol_max": 10**9}, "more than 16 versions"),
        ({"model": "m", "fast": True, "cheap": True}, "unknown fields in the request for a route: cheap, fast"),
    ],
)
async def test_a_wrong_request_for_a_route_is_refused_with_its_reason(
    tracker: Tracker, document: Any, reason: str
) -> None:
    status, body = await tracker.raw("POST", "/v1/route", json=document)
    assert (status, body["error"]["code"]) == (400, "invalid_input")
    assert reason in body["error"]["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b"NaN", b'{"model": Infinity}', b"9" * 5000]
)
async def test_a_body_that_is_no_json_is_refused(tracker: Tracker, body: bytes) -> None:
    status, answer = await tracker.raw("POST", "/v1/route", data=body)
    assert (status, answer["error"]["code"]) == (400, "invalid_input")


async def test_numbers_beyond_all_floats_are_refused(tracker: Tracker) -> None:
    text = json.dumps(with_shard(decode_ms=12345.5)).replace("12345.5", "1e999")
    status, answer = await tracker.raw("PUT", "/v1/nodes/a", data=text)
    assert status == 400
    assert "decode_ms must be" in answer["error"]["message"]


async def test_a_body_beyond_the_limit_is_refused(tracker: Tracker) -> None:
    status, answer = await tracker.raw("PUT", "/v1/nodes/a", data=b" " * (MAX_BODY + 1))
    assert (status, answer["error"]["code"]) == (413, "too_large")


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/", 404, None),
        ("GET", "/v1/nodes", 404, None),
        ("GET", "/v1/nodes/a", 405, "DELETE,PUT"),
        ("GET", "/v1/route", 405, "POST"),
        ("DELETE", "/v1/snapshot", 405, "GET,HEAD"),
    ],
)
async def test_unknown_paths_and_methods_are_refused_in_json(
    tracker: Tracker, method: str, path: str, status: int, allow: str | None
) -> None:
    async with tracker.http.request(method, tracker.url + path) as response:
        assert response.status == status
        assert response.headers.get("Allow") == allow
        assert (await response.json())["error"]["code"] == "invalid_input"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/snapshot?pretty=1"),
        ("GET", "/healthz?x"),
        ("GET", "/readyz?x"),
        ("GET", "/metrics?name=x"),
        ("POST", "/v1/route?model=m"),
        ("PUT", "/v1/nodes/a?lease_s=99"),
        ("DELETE", "/v1/nodes/a?force=1"),
        ("DELETE", "/v1/nodes/a?boot=b-1&boot=b-2"),
        ("DELETE", "/v1/nodes/a%20b"),
    ],
)
async def test_parameters_that_are_unknown_or_wrong_are_refused(tracker: Tracker, method: str, path: str) -> None:
    status, body = await tracker.raw(method, path)
    assert (status, body["error"]["code"]) == (400, "invalid_input")


async def test_a_fault_of_the_trackers_own_is_answered_and_logged(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(tracker.directory, "snapshot", broken)
    status, body = await tracker.raw("GET", "/v1/snapshot")
    assert (status, body["error"]["code"]) == (500, "internal")
    assert "a bug" not in str(body)
    assert "RuntimeError: a bug" in caplog.text


# -- what takes long --------------------------------------------------------------------------------------------------


class Held:
    """Takes the place of a function that takes long: it waits until the test lets it go on."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._begun, self._go_on = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._begun.set()
        assert self._go_on.wait(60)
        return self._function(*arguments, **named)

    async def begun(self) -> None:
        assert await asyncio.to_thread(self._begun.wait, 60)

    def go_on(self) -> None:
        self._go_on.set()


async def test_a_slow_plan_holds_up_no_heartbeat(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "plan_route", slow := Held(directory_module.plan_route))
    await tracker.client.heartbeat(node("a", "0-29", beat=1))
    asked = asyncio.create_task(tracker.client.route("m"))
    await slow.begun()
    await tracker.client.heartbeat(node("a", "0-29", beat=2, sessions=3))
    await tracker.client.heartbeat(node("b", "0-29"))
    assert [known.node_id for known in (await tracker.client.snapshot()).nodes] == ["a", "b"]
    await tracker.client.leave("a", boot="b-a")
    assert not asked.done()
    slow.go_on()
    assert str(await asked) == "a[0-29]"  # over the nodes as they were when it was asked for
    assert str(await tracker.client.route("m")) == "b[0-29]"


async def test_a_slow_placement_holds_up_no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlacementDesk, "ask", slow := Held(lambda *_: Wish(LayerRange(0, 3))))
    directory = Directory(ManualClock())
    async with serving(create_app(directory)) as url, aiohttp.ClientSession() as http:
        running = Tracker(url, directory, ManualClock(), http)
        await running.client.heartbeat(node("a"))
        asked = asyncio.create_task(running.client.wish("a", boot="b-a"))
        await slow.begun()
        await running.client.heartbeat(node("b"))
        assert not asked.done()
        slow.go_on()
        assert (await asked).layers == LayerRange(0, 3)
        await running.client.close()


async def test_routes_asked_for_at_once_know_of_each_other(tracker: Tracker) -> None:
    for name in ("a", "b"):
        await tracker.client.heartbeat(node(name, "0-29"))
    routes = await asyncio.gather(*(tracker.client.route("m", demand=Demand(explore=False)) for _ in range(20)))
    taken = Counter(route.hops[0].node_id for route in routes)
    assert taken == {"a": 10, "b": 10}
