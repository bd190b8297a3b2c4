"""`meshnet events`: what it shows of a tracker's log, and how it goes on when another tracker answers."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest
from typer.testing import CliRunner

from announcements import node
from app_thread import serving_app
from meshnet_cli import events
from meshnet_cli.main import app
from meshnet_core.clock import ManualClock
from meshnet_core.errors import InvalidInputError
from meshnet_core.event_page import EventPage, NodeEvent
from meshnet_tracker.directory import Directory
from meshnet_tracker.server import create_app
from web_on_socket import serving


def shown(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["events", *arguments])
    assert result.exit_code == code, result.output
    return result.stdout


def happened(seq: int, *, at: float, name: str = "a") -> NodeEvent:
    return NodeEvent(seq, at, "join", name, f"node {name} joined")


def test_what_happened_is_shown_in_order_and_as_json() -> None:
    directory = Directory(ManualClock())
    with serving_app(create_app(directory)) as url:
        assert "nothing has happened" not in shown("--tracker", url, "--last", "0")  # that is said on stderr
        directory.announce(node("a", "0-29"))
        directory.announce(node("b", "0-29", draining=True))
        directory.leave("a")
        lines = shown("--tracker", url).splitlines()
        assert [one.split()[2] for one in lines] == ["join", "join", "leave"]
        assert lines[2].endswith("node a left")
        assert shown("--tracker", url, "--last", "1").splitlines() == lines[2:]
        document = json.loads(shown("--tracker", url, "--json", "--last", "2"))
        assert document["last"] == 3
        assert [one["seq"] for one in document["events"]] == [2, 3]


def test_no_tracker_is_told_and_not_tried_for_ever() -> None:
    assert CliRunner().invoke(app, ["events", "--tracker", "http://127.0.0.1:9", "--follow"]).exit_code != 0


async def test_followed_events_come_as_they_happen_and_from_the_tracker_that_took_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "RETRY_S", 0.01)
    one, two = Directory(ManualClock()), Directory(ManualClock())
    apps = [create_app(one), create_app(two)]
    one.announce(node("old", "0-29"))
    one.announce(node("a", "0-29"))
    two.announce(node("old", "0-29"))
    seen: asyncio.Queue[str] = asyncio.Queue()

    async def read(url: str) -> None:
        async with aclosing(events.EventSource([url], None, insecure=False).follow(1)) as following:
            async for event in following:
                seen.put_nowait(f"{event.kind} {event.node}")

    async with asyncio.timeout(30):
        async with serving(apps[0]) as url:
            reading = asyncio.create_task(read(url))
            assert await seen.get() == "join a"
            one.announce(node("b", "0-29"))
            assert await seen.get() == "join b"
        async with serving(apps[1], int(url.rpartition(":")[2])):
            two.announce(node("c", "0-29"))

            assert await seen.get() == "join c"  # and not `old` once more
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


def test_of_another_tracker_only_what_is_later_is_new() -> None:
    tail = events.Tail()
    assert tail.fresh(EventPage("one", 2, 0, (happened(1, at=10), happened(2, at=20)))) == (
        happened(1, at=10),
        happened(2, at=20),
    )
    assert (tail.log, tail.seq) == ("one", 2)
    assert tail.fresh(EventPage("one", 3, 0, (happened(3, at=19),))) == (happened(3, at=19),)  # a clock set back
    assert tail.fresh(EventPage("two", 8, 0, (happened(7, at=20), happened(8, at=21)))) == (happened(8, at=21),)
    assert (tail.log, tail.seq) == ("two", 8)
    assert tail.fresh(EventPage("two", 8, 0, ())) == ()


@pytest.mark.parametrize(
    "document",
    [
        {"last": 1, "missed": 0, "events": []},
        {"log": "t", "last": 1, "missed": 0, "events": [{}]},
        {"log": "t", "last": 1, "missed": 0, "events": [1]},
        {"log": "t", "last": "1", "missed": 0, "events": []},
    ],
)
def test_a_page_that_is_none_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError):
        EventPage.from_wire(document)
