"""The dashboard's page as NiceGUI builds it, without a browser: the login, what is shown, and the chat box."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from api_client import app_of
from meshnet_core.clock import SystemClock
from meshnet_core.errors import LayersUnavailableError
from meshnet_gateway.api_keys import ApiKeys
from meshnet_gateway.dashboard.access import Access
from meshnet_gateway.dashboard.chat_source import ChatSource
from meshnet_gateway.dashboard.watch import Watch
from meshnet_gateway.text_model import TextModel
from scripted_engine import FixedMesh, ScriptedEngine, Step, summary, tokens
from tiny_tokenizers import byte_level_files

testing = pytest.importorskip("nicegui.testing", reason="NiceGUI is not installed (pip install 'meshnet[dashboard]')")
ui = pytest.importorskip("nicegui").ui
page = pytest.importorskip("meshnet_gateway.dashboard.page")

KEY = "a-key-of-enough-letters"
SHARD = {"model": "tiny", "layers": "0-3", "dtype": "float32", "loaded": True, "decode_ms": None}
NODE = {"node": "attic", "device": "cpu", "draining": False, "answers": True, "layers": [SHARD]}
MODEL = {"name": "tiny", "num_layers": 4, "expected_ms_per_token": 10.0}


class ShownMesh(FixedMesh):
    """One that has a node to show."""

    async def status(self) -> dict[str, Any]:
        return {"nodes": [NODE], "models": [MODEL], "degraded": ["no tracker answers"], "trackers": []}


@pytest.fixture(scope="module")
def model() -> TextModel:
    files = byte_level_files()
    config = {**json.loads(files["config.json"]), "max_position_embeddings": 4096}
    return TextModel.from_files("tiny", "f" * 64, {**files, "config.json": json.dumps(config).encode()})


@asynccontextmanager
async def visiting(engine: ScriptedEngine, model: TextModel, keys: ApiKeys | None = None) -> AsyncIterator[Any]:
    """A visitor of the page, whose tab holds no key."""
    app = app_of(engine, model, ShownMesh([summary("tiny")]))
    door = app.state.door
    watch = Watch(door.mesh.status, door.figures.live, SystemClock())
    access = Access(keys, app.state.doorkeeper)

    async def root() -> None:
        await page.show(watch, ChatSource(door), access)

    async with testing.user_simulation(root) as user, watch.watching():
        user.javascript_rules[re.compile(".*sessionStorage.getItem")] = lambda _: ""
        yield user


async def soon(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 - what a page shows tells nobody that it changed
            await asyncio.sleep(0.02)


def content(user: Any, kind: type) -> str:
    """What all elements of a kind say."""
    return "\n".join(str(getattr(one, "content", None) or getattr(one, "text", "")) for one in user.find(kind).elements)


async def test_it_shows_the_machines_their_layers_and_what_is_amiss(model: TextModel) -> None:
    async with visiting(ScriptedEngine(), model) as user:
        await user.open("/")
        await soon(lambda: "attic" in content(user, ui.html))
        assert "Whole: 4 layers" in content(user, ui.html)
        await soon(lambda: "no tracker answers" in content(user, ui.label))


async def test_nothing_of_the_mesh_is_on_the_page_before_a_key_is_given(model: TextModel) -> None:
    async with visiting(ScriptedEngine(), model, ApiKeys([KEY])) as user:
        await user.open("/")
        await user.should_see("API key", retries=50)
        assert "attic" not in content(user, ui.html)
        user.find(ui.input).type("wrong").trigger("keydown.enter")
        await user.should_see("this API key is not taken here", retries=50)
        user.find(ui.input).clear().type(KEY).trigger("keydown.enter")
        await soon(lambda: "attic" in content(user, ui.html))
        await user.should_see("Log out")


async def answered(user: Any, question: str) -> None:
    (choice,) = user.find(ui.select).elements
    await soon(lambda: choice.value == "tiny")
    user.find(ui.textarea).type(question)
    user.find("Send").click()


async def test_the_chat_box_answers_and_goes_on(model: TextModel) -> None:
    engine = ScriptedEngine(lambda _: [*tokens(model.encode("Hello, world!")), *tokens([2])])
    async with visiting(engine, model) as user:
        await user.open("/")
        await answered(user, "Say hello")
        await user.should_see("Hello, world!", retries=100)
        await soon(lambda: len(engine.closed) == 1)
        await answered(user, "Once more")
        await soon(lambda: len(engine.closed) == 2)
    assert len(engine.requests[1].prompt_ids) > len(engine.requests[0].prompt_ids)
    said = model.encode("Hello, world!")
    assert any(engine.requests[1].prompt_ids[at : at + len(said)] == said for at in range(64))


@pytest.mark.parametrize("begun", [False, True])
async def test_an_error_is_shown_and_the_next_question_is_taken(model: TextModel, begun: bool) -> None:
    before: list[Step] = [*tokens(model.encode("Well"))] if begun else []
    engine = ScriptedEngine([*before, LayersUnavailableError("layers 2-3 are served by no node")])
    async with visiting(engine, model) as user:
        await user.open("/")
        await answered(user, "Say hello")
        await user.should_see("layers 2-3 are served by no node", retries=100)
        engine.script = [*tokens(model.encode("Fine.")), *tokens([2])]
        await answered(user, "Again")
        await user.should_see("Fine.", retries=100)


@pytest.mark.parametrize("how", ["Stop", "New chat"])
async def test_an_answer_that_is_stopped_gives_its_sessions_back(model: TextModel, how: str) -> None:
    engine = ScriptedEngine([*tokens(model.encode("Well")), asyncio.Event()])
    async with visiting(engine, model) as user:
        await user.open("/")
        await answered(user, "Say hello")
        await user.should_see("Well", retries=100)
        user.find(how).click()
        await soon(lambda: engine.closed == ["s-1"])
        await user.should_see("Stopped.", retries=100)
