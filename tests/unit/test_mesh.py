"""The mesh as the gateway sees it, while the tracker answers, is gone or hangs, and while nodes do."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from announcements import node, shard, snapshot
from free_ports import free_port
from meshnet_core.clock import ManualClock
from meshnet_core.demand import Demand
from meshnet_core.errors import LayersUnavailableError, ModelNotFoundError, TrackerUnreachableError
from meshnet_core.membership import Snapshot
from meshnet_core.planning import plan_route
from meshnet_core.route import Route
from meshnet_core.tracker_client import TrackerHealth
from meshnet_gateway import mesh as mesh_module
from meshnet_gateway.mesh import SNAPSHOT_AGE_S, Mesh, degradations
from web_on_socket import serving

TWO = snapshot(node("a", "0-14"), node("b", "15-29"))
THREE = snapshot(node("a", "0-14"), node("b", "15-29"), node("c", "15-29"))


class FakeTracker:
    """Knows ``known``; ``mood`` is ``answers``, ``gone`` or ``hangs``."""

    url = "http://tracker:7400"

    def __init__(self, known: Snapshot) -> None:
        self.known = known
        self.mood = "answers"
        self.asked: list[str] = []

    async def _answer(self, what: str) -> None:
        self.asked.append(what)
        if self.mood == "hangs":
            await asyncio.Event().wait()
        if self.mood == "gone":
            raise TrackerUnreachableError("no tracker answers")

    async def snapshot(self) -> Snapshot:
        await self._answer("snapshot")
        return self.known

    async def route(
        self,
        model: str,
        excluded: frozenset[str] = frozenset(),
        *,
        fingerprint: str | None = None,
        demand: Demand | None = None,
    ) -> Route:
        await self._answer("route")
        return plan_route(self.known, model, excluded, fingerprint=fingerprint, demand=demand)

    async def health(self) -> list[TrackerHealth]:
        return [TrackerHealth(self.url, self.mood == "answers")]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def tracker() -> FakeTracker:
    return FakeTracker(TWO)


@pytest.fixture
async def mesh(tracker: FakeTracker, clock: ManualClock) -> AsyncIterator[Mesh]:
    mesh = Mesh(tracker, clock)
    yield mesh
    await mesh.close()


async def soon(what: Callable[[], Any]) -> Any:
    """What must not wait for anybody."""
    return await asyncio.wait_for(what(), 20)


# -- snapshots --------------------------------------------------------------------------------------------------------


async def test_a_young_snapshot_is_not_asked_for_again(mesh: Mesh, tracker: FakeTracker, clock: ManualClock) -> None:
    assert await mesh.snapshot() == TWO
    tracker.known = THREE
    clock.advance(SNAPSHOT_AGE_S - 0.01)
    assert await mesh.snapshot() == TWO
    clock.advance(0.01)
    assert await mesh.snapshot() == THREE
    assert tracker.asked == ["snapshot"] * 2


async def test_without_a_tracker_from_the_start_there_is_nothing_to_go_on_from(
    mesh: Mesh, tracker: FakeTracker
) -> None:
    tracker.mood = "gone"
    for _ in range(2):
        with pytest.raises(TrackerUnreachableError):
            await mesh.models()
    tracker.mood = "answers"
    assert [model.name for model in await mesh.models()] == ["m"]


@pytest.mark.parametrize("noticed", [True, False])
async def test_a_tracker_that_started_again_is_given_time_to_hear_of_all_nodes(
    mesh: Mesh, tracker: FakeTracker, clock: ManualClock, *, noticed: bool
) -> None:
    model = await mesh.model("m")
    if noticed:
        tracker.mood = "gone"
        clock.advance(SNAPSHOT_AGE_S)
        await mesh.route(model, frozenset())
        tracker.mood = "answers"
    tracker.known = Snapshot((), settled=False)
    clock.advance(SNAPSHOT_AGE_S)
    if noticed:
        await mesh.snapshot()  # asks beside the call
        while tracker.asked[-1] != "snapshot":  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert await mesh.snapshot() == TWO
    assert await mesh.model("m") == model
    assert [hop.node_id for hop in (await mesh.route(model, frozenset())).hops] == ["a", "b"]
    with pytest.raises(LayersUnavailableError):
        await mesh.route(model, frozenset({"a"}))

    again = node("b", "15-29", boot="b-later")
    tracker.known = Snapshot((again,), settled=False)
    clock.advance(SNAPSHOT_AGE_S)
    assert (await mesh.snapshot()).nodes == (TWO.nodes[0], again)
    tracker.known = Snapshot((), settled=False)  # and has left
    clock.advance(SNAPSHOT_AGE_S)
    assert (await mesh.snapshot()).nodes == TWO.nodes[:1]
    tracker.known = Snapshot(())  # whoever was not heard of in all that time is gone
    clock.advance(SNAPSHOT_AGE_S)
    assert (await mesh.snapshot()).nodes == ()
    with pytest.raises(ModelNotFoundError):
        await mesh.route(model, frozenset())


async def test_while_the_tracker_is_gone_the_last_snapshot_serves(
    mesh: Mesh, tracker: FakeTracker, clock: ManualClock
) -> None:
    model = await mesh.model("m")
    tracker.mood = "gone"
    clock.advance(3600)
    assert await mesh.snapshot() == TWO
    assert await mesh.model("m") == model
    route = await mesh.route(model, frozenset())
    assert [hop.node_id for hop in route.hops] == ["a", "b"]
    with pytest.raises(LayersUnavailableError, match="15-29"):
        await mesh.route(model, frozenset({"b"}))


async def test_a_tracker_that_hangs_holds_up_nobody_once_that_is_known(
    mesh: Mesh, tracker: FakeTracker, clock: ManualClock
) -> None:
    model = await mesh.model("m")
    tracker.mood = "gone"
    clock.advance(SNAPSHOT_AGE_S)
    await mesh.snapshot()
    tracker.mood = "hangs"
    for _ in range(3):
        assert await soon(mesh.snapshot) == TWO
        assert len((await soon(lambda: mesh.route(model, frozenset()))).hops) == 2
        await asyncio.sleep(0)
    assert tracker.asked.count("route") == 0
    assert len(tracker.asked) <= 4  # one question at a time


async def test_a_tracker_that_is_back_is_asked_again(mesh: Mesh, tracker: FakeTracker, clock: ManualClock) -> None:
    model = await mesh.model("m")
    tracker.mood = "gone"
    clock.advance(SNAPSHOT_AGE_S)
    assert len((await mesh.route(model, frozenset())).hops) == 2
    assert (await mesh.status())["tracker"] == {"url": tracker.url, "answers": False}
    tracker.mood, tracker.known = "answers", THREE
    await mesh.snapshot()
    await asyncio.sleep(0)
    assert await mesh.snapshot() == THREE
    assert (await mesh.status())["tracker"]["answers"]
    tracker.asked.clear()
    await mesh.route(model, frozenset({"b"}))
    assert tracker.asked == ["route"]


# -- models and routes ------------------------------------------------------------------------------------------------


async def test_an_unknown_model_is_told_which_there_are(mesh: Mesh, tracker: FakeTracker, clock: ManualClock) -> None:
    with pytest.raises(ModelNotFoundError, match="'gpt-4'; there is m"):
        await mesh.model("gpt-4")
    tracker.known = snapshot()
    clock.advance(SNAPSHOT_AGE_S)
    with pytest.raises(ModelNotFoundError, match="none yet"):
        await mesh.model("m")


async def test_of_two_models_of_one_name_the_whole_one_is_served(mesh: Mesh, tracker: FakeTracker) -> None:
    tracker.known = snapshot(
        node("x", shard("0-20", fingerprint="f0")),
        node("a", shard("0-14")),
        node("b", shard("15-29")),
    )
    assert [(model.fingerprint, model.complete) for model in await mesh.models()] == [("f0", False), ("f1", True)]
    model = await mesh.model("m")
    assert (model.fingerprint, model.complete) == ("f1", True)
    assert {hop.node_id for hop in (await mesh.route(model, frozenset())).hops} == {"a", "b"}
    assert [node.node_id for node in await mesh.nodes_of(model)] == ["a", "b"]


@pytest.mark.parametrize("mood", ["answers", "gone"])
async def test_a_route_leaves_out_who_is_excluded_and_keeps_to_the_fingerprint(
    mesh: Mesh, tracker: FakeTracker, mood: str
) -> None:
    tracker.known = snapshot(*THREE.nodes, node("other", shard("0-29", fingerprint="f9")))
    model = next(model for model in await mesh.models() if model.fingerprint == "f1")
    tracker.mood = mood
    route = await mesh.route(model, frozenset({"b"}))
    assert ([hop.node_id for hop in route.hops], route.fingerprint) == (["a", "c"], "f1")
    with pytest.raises(LayersUnavailableError, match="15-29"):
        await mesh.route(model, frozenset({"b", "c"}))


# -- status -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def healthz(answer: Callable[[], web.StreamResponse]) -> AsyncIterator[str]:
    """The URL of a node whose health is ``answer``."""

    async def handle(_: web.Request) -> web.StreamResponse:
        return answer()

    app = web.Application()
    app.router.add_get("/healthz", handle)
    async with serving(app) as url:
        yield url


async def status_of(mesh: Mesh, tracker: FakeTracker, url: str) -> dict[str, Any]:
    tracker.known = snapshot(node("a", "0-14", url=url, sessions=3, state_bytes=7))
    (told,) = (await mesh.status())["nodes"]
    assert (told["node"], told["url"]) == ("a", url)
    shown = {"model": "m", "fingerprint": "f1", "layers": "0-14", "dtype": "float32", "loaded": True, "decode_ms": 1.0}
    assert told["layers"] == [shown]
    return dict(told)


async def test_the_status_tells_the_gaps_and_what_each_node_says_now(mesh: Mesh, tracker: FakeTracker) -> None:
    def answer() -> web.StreamResponse:
        return web.json_response({"boot": "b-1", "sessions": 5, "state_bytes": 11, "secret": "x"})

    async with healthz(answer) as url:
        told = await status_of(mesh, tracker, url)
    assert (told["answers"], told["boot"], told["sessions"], told["state_bytes"]) == (True, "b-1", 5, 11)
    assert "secret" not in told
    assert told["compile"] == {}
    (model,) = (await mesh.status())["models"]
    assert (model["name"], model["complete"], model["missing_layers"]) == ("m", False, ["15-29"])


async def test_what_a_node_says_of_its_steps_is_passed_on(mesh: Mesh, tracker: FakeTracker) -> None:
    steps = {"layers 0-14 of m": {"state": "native", "seconds": 0.0, "detail": ""}}
    async with healthz(lambda: web.json_response({"boot": "b-1", "compile": steps})) as url:
        assert (await status_of(mesh, tracker, url))["compile"] == steps


async def test_a_node_that_is_gone_is_shown_as_it_last_announced_itself(mesh: Mesh, tracker: FakeTracker) -> None:
    told = await status_of(mesh, tracker, f"http://127.0.0.1:{free_port()}")
    assert (told["answers"], told["sessions"], told["state_bytes"]) == (False, 3, 7)
    assert "compile" not in told  # nobody tells


@pytest.mark.parametrize(
    "answer",
    [
        lambda: web.Response(text="<html>", content_type="text/html"),
        lambda: web.Response(text="{", content_type="application/json"),
        lambda: web.json_response(["boot"]),
        lambda: web.json_response(5),
    ],
    ids=["html", "half a document", "a list", "a number"],
)
async def test_a_node_that_answers_nonsense_does_not_spoil_the_status(
    mesh: Mesh, tracker: FakeTracker, answer: Callable[[], web.StreamResponse]
) -> None:
    async with healthz(answer) as url:
        told = await status_of(mesh, tracker, url)
    assert (told["answers"], told["sessions"]) == (False, 3)


async def test_a_node_that_hangs_is_not_waited_for_long(
    mesh: Mesh, tracker: FakeTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_module, "NODE_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listening:  # whoever connects waits in its backlog
        told = await status_of(mesh, tracker, f"http://127.0.0.1:{listening.getsockname()[1]}")
    assert (told["answers"], told["sessions"]) == (False, 3)


async def test_closing_twice_is_closing(mesh: Mesh, tracker: FakeTracker, clock: ManualClock) -> None:
    await mesh.snapshot()
    tracker.mood = "gone"
    clock.advance(SNAPSHOT_AGE_S)
    await mesh.snapshot()
    tracker.mood = "hangs"
    await mesh.snapshot()
    await mesh.close()
    await mesh.close()


# -- degraded ---------------------------------------------------------------------------------------------------------


ONE, TWO_URL = "http://one:7400", "http://two:7400"


@pytest.mark.parametrize(
    ("trackers", "said"),
    [
        ([TrackerHealth(ONE, True, "none")], []),
        ([TrackerHealth(ONE, True, "reachable"), TrackerHealth(TWO_URL, True, "reachable")], []),
        (
            [TrackerHealth(ONE, False), TrackerHealth(TWO_URL, True, "reachable")],
            [f"trackers that do not answer: {ONE}"],
        ),
        (
            [TrackerHealth(ONE, True, "unreachable"), TrackerHealth(TWO_URL, True, "unreachable")],
            [f"trackers that do not reach their registry, and go on by themselves: {ONE}, {TWO_URL}"],
        ),
        (
            [TrackerHealth(ONE, False), TrackerHealth(TWO_URL, False)],
            [f"no tracker answers ({ONE}, {TWO_URL}): routes are planned from what was known 7 s ago"],
        ),
        (
            [TrackerHealth(ONE, False), TrackerHealth(TWO_URL, True, "unreachable")],
            [
                f"trackers that do not answer: {ONE}",
                f"trackers that do not reach their registry, and go on by themselves: {TWO_URL}",
            ],
        ),
    ],
)
def test_what_is_degraded_is_said_in_words(trackers: list[TrackerHealth], said: list[str]) -> None:
    assert degradations(trackers, 7.2) == said


async def test_the_status_tells_of_each_tracker_and_of_the_snapshots_age(
    mesh: Mesh, tracker: FakeTracker, clock: ManualClock
) -> None:
    tracker.known = snapshot()
    await mesh.snapshot()
    tracker.mood = "gone"
    clock.advance(40)
    told = await mesh.status()
    assert told["trackers"] == [{"url": tracker.url, "answers": False, "registry": None, "nodes": None}]
    assert told["snapshot_age_s"] == 40.0
    assert told["degraded"] == [f"no tracker answers ({tracker.url}): routes are planned from what was known 40 s ago"]
