"""The tracker's log of events over HTTP: numbers, waiting for the next one, what was forgotten."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest

from announcements import node
from memory_registry import MemoryRegistry, MemoryStore
from meshnet_core.clock import ManualClock
from meshnet_core.tracker_client import MeshOfTrackers
from meshnet_tracker.directory import Directory
from meshnet_tracker.events import EventLog, Joined
from meshnet_tracker.server import create_app
from meshnet_tracker.sharing import Sharing, TrackerInfo
from tracker_on_socket import Tracker, tracker_on_socket
from web_on_socket import serving


@pytest.fixture
async def tracker() -> AsyncIterator[Tracker]:
    async for running in tracker_on_socket():
        yield running


async def test_events_are_numbered_and_told_from_any_number_on(tracker: Tracker) -> None:
    for told in (node("a", beat=1), node("a", beat=2, draining=True), node("b", beat=1)):
        await tracker.client.heartbeat(told)
    await tracker.client.leave("a", boot="b-a")
    tracker.clock.advance(15)
    _, told = await tracker.raw("GET", "/v1/events")
    assert [(event["seq"], event["kind"], event["node"]) for event in told["events"]] == [
        (1, "join", "a"),
        (2, "drain", "a"),
        (3, "join", "b"),
        (4, "leave", "a"),
    ]
    assert (told["last"], told["missed"]) == (4, 0)
    tracker.directory.expire()
    _, later = await tracker.raw("GET", f"/v1/events?since=4&log={told['log']}")
    assert [(event["seq"], event["kind"], event["text"]) for event in later["events"]] == [
        (5, "death", "node b was not heard of for 15.0 s: its lease has expired")
    ]
    for kind, count in (("join", 2), ("drain", 1), ("leave", 1), ("death", 1), ("restart", 0)):
        assert await tracker.metric(f'meshnet_tracker_events_total{{kind="{kind}"}}') == count


async def test_who_waits_for_an_event_is_told_when_it_comes(tracker: Tracker) -> None:
    waiting = asyncio.create_task(tracker.raw("GET", "/v1/events?since=0&wait_s=60"))
    await asyncio.sleep(0)
    await tracker.client.heartbeat(node("a"))
    _, told = await asyncio.wait_for(waiting, 20)
    assert [event["kind"] for event in told["events"]] == ["join"]
    _, nothing = await tracker.raw("GET", "/v1/events?since=1")
    assert nothing["events"] == []


async def test_numbers_of_another_trackers_log_begin_anew(tracker: Tracker) -> None:
    await tracker.client.heartbeat(node("a"))
    _, told = await tracker.raw("GET", "/v1/events?since=900&log=t-other")
    assert [event["seq"] for event in told["events"]] == [1]


def test_a_log_forgets_the_oldest_and_a_reader_can_tell() -> None:
    log = EventLog(lambda: 5.0, kept=2)
    for _ in range(4):
        log.add(Joined(node("a")))
    assert [logged.seq for logged in log.since(0)] == [3, 4]
    assert [logged.seq for logged in log.since(3)] == [4]


@pytest.mark.parametrize(
    "query", ["since=-1", "since=x", "since=1.5", "wait_s=61", "wait_s=", "until=3", "since=1&since=2"]
)
async def test_a_wrong_question_for_events_is_refused(tracker: Tracker, query: str) -> None:
    status, body = await tracker.raw("GET", f"/v1/events?{query}")
    assert (status, body["error"]["code"]) == (400, "invalid_input")


async def test_a_tracker_that_shares_says_so_in_every_answer() -> None:
    clock = ManualClock()
    directory, store = Directory(clock), MemoryStore(clock)
    wire = MemoryRegistry(store)
    sharing = Sharing(directory, wire, TrackerInfo("t-one", "http://one:7400", "0.1.0"), clock)
    other = TrackerInfo("t-two", "http://two:7400", "0.1.0")
    store.kept["tracker/t-two/"] = (json.dumps({"tracker": other.to_wire()}), clock.now() + 15)
    async with serving(create_app(directory, sharing=sharing)) as url, aiohttp.ClientSession() as http:
        running = Tracker(url, directory, clock, http)
        async with asyncio.timeout(20):
            while not sharing.reachable:  # noqa: ASYNC110
                await asyncio.sleep(0)
        await running.client.heartbeat(node("a"))
        assert running.client.told == MeshOfTrackers(("http://two:7400",), "reachable")
        assert (await running.client.health())[0].registry == "reachable"
        assert await running.metric("meshnet_tracker_registry_reachable ") == 1
        assert await running.metric("meshnet_tracker_other_trackers ") == 1
        assert await running.metric('meshnet_tracker_leases{told_by="node"}') == 1
        wire.cut = True
        async with asyncio.timeout(20):
            while sharing.reachable:  # noqa: ASYNC110
                await asyncio.sleep(0)
        await running.client.snapshot()
        assert running.client.told == MeshOfTrackers(("http://two:7400",), "unreachable")
        _, health = await running.raw("GET", "/healthz")
        assert (health["status"], health["registry"]["reachable"]) == ("degraded", False)
        assert await running.metric("meshnet_tracker_registry_reachable ") == 0
        await running.client.close()
