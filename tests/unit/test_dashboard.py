"""The dashboard beneath its page: who is let in, what is asked and when, what the chat hears, and how it is served."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from meshnet_core.clock import ManualClock
from meshnet_core.doorkeeper import Doorkeeper
from meshnet_core.errors import ForbiddenError, RateLimitedError, TrackerUnreachableError
from meshnet_gateway.api_keys import ApiKeys, KeyCheck
from meshnet_gateway.dashboard.access import Access, Visitor
from meshnet_gateway.dashboard.chat_source import BrokeOff, Ended, Reading, Said, events_in
from meshnet_gateway.dashboard.mount import HOW_TO_GET, dashboard
from meshnet_gateway.dashboard.watch import LOOKED_AT_S, Watch
from meshnet_gateway.live_generations import LiveGenerations

KEY = "a-key-of-enough-letters"


def doorkeeper(burst: float = 100) -> Doorkeeper:
    return Doorkeeper(ManualClock(), per_s=1, burst=burst)


# -- who is let in ----------------------------------------------------------------------------------------------------


def test_a_key_that_is_taken_opens() -> None:
    keys = ApiKeys([KEY])
    assert Access(keys, doorkeeper()).enter(f" {KEY} ", "1.2.3.4") == Visitor(keys.identify(KEY.encode()))


@pytest.mark.parametrize(("key", "counted"), [("", "no_key"), ("another", "wrong_key"), ("schlüssel", "wrong_key")])
def test_any_other_does_not_and_is_counted(key: str, counted: str) -> None:
    door = doorkeeper()
    with pytest.raises(ForbiddenError, match="one of the gateway's keys"):
        Access(ApiKeys([KEY]), door).enter(key, "1.2.3.4")
    assert door.turned_away[counted] == 1


def test_keys_cannot_be_guessed_at_any_speed() -> None:
    access = Access(ApiKeys([KEY]), doorkeeper(burst=2))
    for _ in range(2):
        with pytest.raises(ForbiddenError):
            access.enter("guess", "1.2.3.4")
    with pytest.raises(RateLimitedError):
        access.enter(KEY, "1.2.3.4")


def test_where_no_key_is_needed_everybody_is_a_visitor() -> None:
    access = Access(None, doorkeeper())
    assert not access.needs_key
    assert access.enter("", "1.2.3.4") == Visitor(None)


@pytest.mark.parametrize(
    ("path", "status"), [("/dashboard", 404), ("/dashboard/x", 404), ("/dashboards", 401), ("/v1/meshnet/status", 401)]
)
def test_only_the_dashboards_own_paths_need_no_key_in_the_header(path: str, status: int) -> None:
    app = FastAPI()
    app.add_middleware(KeyCheck, keys=ApiKeys([KEY]), doorkeeper=doorkeeper())
    assert TestClient(app).get(path).status_code == status


# -- what is asked ----------------------------------------------------------------------------------------------------


class Mesh:
    """Counts how often it is asked; fails while ``down``."""

    def __init__(self) -> None:
        self.asked = 0
        self.down = False

    async def status(self) -> dict[str, Any]:
        self.asked += 1
        if self.down:
            raise TrackerUnreachableError("no tracker answers")
        return {"models": [], "nodes": [], "degraded": ["one tracker is silent"], "trackers": []}


async def test_the_mesh_is_asked_only_while_somebody_looks() -> None:
    mesh, clock = Mesh(), ManualClock()
    watch = Watch(mesh.status, LiveGenerations(), clock)
    await watch.ask()
    assert mesh.asked == 0
    watch.looks()
    await watch.ask()
    assert mesh.asked == 1
    assert watch.degraded == ["one tracker is silent"]
    clock.advance(LOOKED_AT_S + 1)
    await watch.ask()
    assert mesh.asked == 1


async def test_a_mesh_that_cannot_be_asked_is_told_of_until_it_can() -> None:
    mesh = Mesh()
    watch = Watch(mesh.status, LiveGenerations(), ManualClock())
    watch.looks()
    mesh.down = True
    await watch.ask()
    assert watch.trouble == "no tracker answers"
    mesh.down = False
    await watch.ask()
    assert watch.trouble is None


class Running:
    """A generation whose report the test writes."""

    finish_reason = None

    def __init__(self) -> None:
        self.tokens = 0

    def __aiter__(self) -> AsyncIterator[Any]:
        raise NotImplementedError

    def report(self) -> dict[str, Any]:
        route = [{"node": "a", "layers": "0-9", "dtype": "float32"}]
        return {
            "session": "s-1",
            "mode": "cached",
            "completion_tokens": self.tokens,
            "tokens_per_s": self.tokens / 2,
            "prompt_tokens": 3,
            "route": route,
        }

    async def aclose(self) -> None:
        raise NotImplementedError


async def test_tokens_are_counted_while_they_are_made_and_after() -> None:
    live, clock = LiveGenerations(), ManualClock()
    watch = Watch(Mesh().status, live, clock)
    generation = Running()
    with live.watched(generation, "tiny"):
        await watch.count()
        generation.tokens = 8
        clock.advance(2)
        await watch.count()
        (told,) = live.to_json()
        assert told["model"] == "tiny"
        assert told["route"] == [{"node": "a", "layers": "0-9"}]
    assert watch.speeds() == [(0.0, 4.0)]
    assert live.tokens == 8
    assert live.to_json() == []
    assert live.latest() == {"tiny": {"completion_tokens": 8, "tokens_per_s": 4.0}}
    clock.advance(1)
    await watch.count()
    assert watch.speeds()[-1] == (0.0, 0.0)


# -- what the chat hears ----------------------------------------------------------------------------------------------


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> str:
    return "data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": finish}], **more})


@pytest.mark.parametrize(
    ("event", "heard"),
    [
        (": meshnet prefill 256/600", [Reading(256, 600)]),
        (chunk({"role": "assistant", "content": ""}), []),
        (chunk({"content": "Hel\n\nlo"}), [Said("Hel\n\nlo")]),
        (chunk({"reasoning_content": "hm"}), [Said("hm", thought=True)]),
        (chunk({}, "stop", meshnet={"epochs": 1}), [Ended("stop", {"epochs": 1})]),
        ('data: {"error": {"message": "layers 3-4 lack"}}', [BrokeOff("layers 3-4 lack")]),
        ("data: [DONE]", []),
        ("", []),
    ],
)
def test_events_of_a_chat(event: str, heard: list[Any]) -> None:
    assert events_in(event) == heard


# -- how it is served -------------------------------------------------------------------------------------------------


async def test_without_the_extra_a_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    app = FastAPI()
    async with dashboard(app, None, ManualClock()) as there:
        assert not there
        answer = TestClient(app).get("/dashboard")
    assert answer.status_code == 404
    assert answer.text == f"{HOW_TO_GET}\n"


SERVED = f"""
import asyncio
from starlette.testclient import TestClient
from meshnet_core.clock import SystemClock
from meshnet_gateway.api import create_app
from meshnet_gateway.api_keys import ApiKeys
from meshnet_gateway.dashboard.mount import dashboard

class Mesh:
    async def models(self): return []
    async def status(self): raise AssertionError("asked before anybody entered")

async def main():
    keys = ApiKeys([{KEY!r}])
    app = create_app(None, None, Mesh(), keys=keys)
    async with dashboard(app, keys, SystemClock()):
        def look():
            with TestClient(app) as client:
                print(client.get("/dashboard").text)
                assert client.get("/v1/models").status_code == 401
        await asyncio.to_thread(look)
asyncio.run(main())
"""


def test_the_page_asks_nothing_of_elsewhere_and_tells_nothing() -> None:
    """In a process of its own, since NiceGUI is one for a process."""
    if importlib.util.find_spec("nicegui") is None:
        pytest.skip("NiceGUI is not installed (pip install 'meshnet[dashboard]')")
    done = subprocess.run([sys.executable, "-c", SERVED], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    page = done.stdout
    assert "<title>meshnet</title>" in page
    assert re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]+[^\s\"']*", page) == []
    assert KEY not in page
