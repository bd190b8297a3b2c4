"""Several trackers as one: who is asked, what is learned, and what is said when none answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web

from announcements import node
from meshnet_core.clock import ManualClock
from meshnet_core.errors import InvalidInputError, ModelNotFoundError, TrackerUnreachableError
from meshnet_core.membership import NodeInfo
from meshnet_core.tracker_client import MeshOfTrackers, TrackerClient
from meshnet_core.trackers import Trackers
from meshnet_tracker.directory import Directory
from web_on_socket import serving


class FakeTracker:
    """A directory behind HTTP that names others as it is told to, and may hang."""

    def __init__(self) -> None:
        self.directory = Directory(ManualClock())
        self.named: dict[str, Any] = {"trackers": [], "registry": "none"}
        self.hangs = False
        self.hanging = 0
        self.heartbeats = 0
        self.url = ""
        self._stopping = asyncio.Event()
        self._closing = AsyncExitStack()

    async def start(self) -> str:
        app = web.Application()
        app.add_routes(
            [
                web.put("/v1/nodes/{id}", self._announce),
                web.delete("/v1/nodes/{id}", self._leave),
                web.get("/v1/snapshot", self._snapshot),
                web.post("/v1/route", self._route),
                web.get("/healthz", self._healthz),
            ]
        )
        self._stopping.clear()
        port = int(self.url.rpartition(":")[2]) if self.url else 0
        self.url = await self._closing.enter_async_context(serving(app, port))
        return self.url

    async def stop(self) -> None:
        self._stopping.set()
        await self._closing.aclose()

    def go_on(self) -> None:
        self.hangs = False
        self._stopping.set()

    async def _perhaps_hang(self) -> None:
        if self.hangs:
            self.hanging += 1
            await self._stopping.wait()

    async def _announce(self, request: web.Request) -> web.Response:
        await self._perhaps_hang()
        self.heartbeats += 1
        lease_s = self.directory.announce(NodeInfo.from_wire(await request.json()))
        return web.json_response({"lease_s": lease_s, **self.named})

    async def _leave(self, request: web.Request) -> web.Response:
        await self._perhaps_hang()
        self.directory.leave(request.match_info["id"], request.query.get("boot"))
        return web.json_response({})

    async def _snapshot(self, _: web.Request) -> web.Response:
        await self._perhaps_hang()
        return web.json_response({**self.directory.snapshot().to_wire(), **self.named})

    async def _route(self, _: web.Request) -> web.Response:
        return web.json_response(ModelNotFoundError("no node serves m").to_wire(), status=404)

    async def _healthz(self, _: web.Request) -> web.Response:
        await self._perhaps_hang()
        registry = None if self.named["registry"] == "none" else {"reachable": self.named["registry"] == "reachable"}
        return web.json_response({"status": "ok", "nodes": 0, "registry": registry})

    def ids(self) -> list[str]:
        return [entry.node_id for entry in self.directory.snapshot().nodes]


@pytest.fixture
async def fakes() -> AsyncIterator[list[FakeTracker]]:
    made = [FakeTracker(), FakeTracker(), FakeTracker()]
    for fake in made:
        await fake.start()
    for fake in made:
        fake.named = {"trackers": [other.url for other in made if other is not fake], "registry": "reachable"}
    yield made
    for fake in made:
        await fake.stop()


async def test_the_first_that_answers_is_kept_to(fakes: list[FakeTracker]) -> None:
    trackers = Trackers([fake.url for fake in fakes])
    for beat in (1, 2):
        await trackers.heartbeat(node("a", beat=beat))
    assert [fake.heartbeats for fake in fakes] == [2, 0, 0]
    assert trackers.url == fakes[0].url
    await trackers.close()


async def test_when_it_is_gone_the_next_answers_the_same_call_and_is_kept_to(
    fakes: list[FakeTracker], caplog: pytest.LogCaptureFixture
) -> None:
    trackers = Trackers([fake.url for fake in fakes])
    await trackers.heartbeat(node("a", beat=1))
    await fakes[0].stop()
    assert await trackers.heartbeat(node("a", beat=2)) == 15.0
    assert trackers.url == fakes[1].url
    await fakes[0].start()
    await trackers.heartbeat(node("a", beat=3))
    assert [fake.heartbeats for fake in fakes] == [1, 2, 0]
    assert caplog.text.count("does not answer; asking the one at") == 1
    await trackers.close()


async def test_one_that_hangs_is_left_after_a_moment(fakes: list[FakeTracker]) -> None:
    trackers = Trackers([fake.url for fake in fakes[:2]], patience_s=0.05)
    fakes[0].hangs = True
    fakes[1].directory.announce(node("a"))
    assert [entry.node_id for entry in (await trackers.snapshot()).nodes] == ["a"]
    assert trackers.url == fakes[1].url
    await trackers.close()


async def test_others_are_learned_from_the_answers_and_forgotten_when_they_are_no_longer_named(
    fakes: list[FakeTracker],
) -> None:
    trackers = Trackers([fakes[0].url])
    await trackers.snapshot()
    assert set(trackers.urls) == {fake.url for fake in fakes}
    fakes[0].named["trackers"] = [fakes[1].url]
    await trackers.heartbeat(node("a"))
    assert set(trackers.urls) == {fakes[0].url, fakes[1].url}
    await fakes[0].stop()
    await trackers.heartbeat(node("a"))
    assert fakes[1].ids() == ["a"]
    assert set(trackers.urls) == {fake.url for fake in fakes}  # as the second one tells; the first was given
    await trackers.close()


async def test_a_refusal_is_an_answer_and_no_reason_to_ask_another(fakes: list[FakeTracker]) -> None:
    trackers = Trackers([fake.url for fake in fakes])
    with pytest.raises(ModelNotFoundError):
        await trackers.route("m")
    assert trackers.url == fakes[0].url
    await trackers.close()


async def test_while_trackers_do_not_hear_of_one_another_all_are_told(fakes: list[FakeTracker]) -> None:
    trackers = Trackers([fake.url for fake in fakes], patience_s=1.5)  # sat out once, and more than a stall
    for fake in fakes:
        fake.named["registry"] = "unreachable"
    fakes[1].hangs = True
    await trackers.heartbeat(node("a", beat=1))
    assert [fake.heartbeats for fake in fakes] == [1, 0, 1]
    for fake in fakes:
        fake.named["registry"], fake.hangs = "reachable", False
    await trackers.heartbeat(node("a", beat=2))
    await trackers.heartbeat(node("a", beat=3))
    assert [fake.heartbeats for fake in fakes] == [3, 0, 1]
    await trackers.close()


async def test_when_none_answers_all_are_named(fakes: list[FakeTracker]) -> None:
    trackers = Trackers([fake.url for fake in fakes])
    for fake in fakes:
        await fake.stop()
    with pytest.raises(TrackerUnreachableError, match="none of 3 trackers answers: ") as caught:
        await trackers.snapshot()
    assert all(fake.url in caught.value.message for fake in fakes)
    for fake in fakes:
        await fake.start()
    await trackers.snapshot()
    await trackers.close()


async def test_a_goodbye_reaches_whoever_answers(fakes: list[FakeTracker]) -> None:
    trackers = Trackers([fake.url for fake in fakes])
    fakes[1].directory.announce(node("a"))
    await fakes[0].stop()
    await trackers.leave("a", boot="b-a")
    assert fakes[1].ids() == []
    await trackers.close()


async def test_a_goodbye_reaches_all_while_trackers_do_not_hear_of_one_another(fakes: list[FakeTracker]) -> None:
    trackers = Trackers([fake.url for fake in fakes])
    for fake in fakes:
        fake.named["registry"] = "unreachable"
    await trackers.heartbeat(node("a", beat=1))
    assert [fake.ids() for fake in fakes] == [["a"]] * 3
    await trackers.leave("a", boot="b-a")
    assert [fake.ids() for fake in fakes] == [[]] * 3
    await trackers.close()


async def test_one_that_answers_after_it_was_forgotten_is_known_again(
    fakes: list[FakeTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers = Trackers([fakes[0].url], patience_s=2.0)
    await trackers.snapshot()
    await fakes[2].stop()
    await fakes[0].stop()
    await trackers.snapshot()
    assert trackers.url == fakes[1].url
    await fakes[0].start()
    fakes[0].named["trackers"] = []
    fakes[1].hangs = True
    closed: list[TrackerClient] = []

    async def close_later(client: TrackerClient) -> None:
        closed.append(client)

    with monkeypatch.context() as patched:  # its connections are closed by a task, so maybe a little later
        patched.setattr(TrackerClient, "close", close_later)
        first = asyncio.create_task(trackers.snapshot())
        while fakes[1].hanging < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.2)
        second = asyncio.create_task(trackers.snapshot())
        await first  # from the first tracker, which does not name the second
        fakes[1].go_on()
        await second
    assert any(client.url == fakes[1].url for client in closed)
    assert trackers.url in trackers.urls
    await trackers.snapshot()
    await trackers.close()


async def test_the_health_of_each_is_told(fakes: list[FakeTracker]) -> None:
    trackers = Trackers([fake.url for fake in fakes])
    fakes[0].named["registry"] = "unreachable"
    await fakes[2].stop()
    told = {health.url: (health.answers, health.registry) for health in await trackers.health()}
    assert told == {
        fakes[0].url: (True, "unreachable"),
        fakes[1].url: (True, "reachable"),
        fakes[2].url: (False, None),
    }
    await trackers.close()


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        ({}, MeshOfTrackers()),
        ({"trackers": "http://x", "registry": 3}, MeshOfTrackers()),
        (
            {"trackers": [3, "ftp://x", "http://x:1/"], "registry": "reachable"},
            MeshOfTrackers(("http://x:1",), "reachable"),
        ),
        ({"trackers": ["http://x"] * 99, "registry": "unreachable"}, MeshOfTrackers(("http://x",) * 16, "unreachable")),
    ],
)
async def test_what_an_answer_says_of_others_is_read_carefully(reply: dict[str, Any], told: MeshOfTrackers) -> None:
    async def snapshot(_: web.Request) -> web.Response:
        return web.json_response({"nodes": [], **reply})

    app = web.Application()
    app.router.add_get("/v1/snapshot", snapshot)
    async with serving(app) as url:
        client = TrackerClient(url)
        await client.snapshot()
        assert client.told == told
        await client.close()


@pytest.mark.parametrize("urls", [[], ["10.0.0.5:7400"], ["http://a:1", ""]])
def test_no_tracker_or_none_that_can_be_dialled_is_refused(urls: list[str]) -> None:
    with pytest.raises(InvalidInputError, match="tracker"):
        Trackers(urls)
