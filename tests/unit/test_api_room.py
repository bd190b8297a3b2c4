"""What clients and watchers are told when there is no room: a 429, when to come back, and figures."""

from __future__ import annotations

import asyncio

import pytest

from api_client import USER, get, post
from meshnet_core.clock import ManualClock
from meshnet_core.errors import CacheFullError
from meshnet_gateway.api import create_app
from meshnet_gateway.generation import GenerationRequest
from meshnet_gateway.text_model import TextModel
from meshnet_gateway.waiting_room import NoRoomError, WaitingRoom
from scripted_engine import FixedMesh, FixedTexts, ScriptedEngine, ScriptedGeneration, tokens
from tiny_tokenizers import byte_level_files


@pytest.fixture(scope="module")
def model() -> TextModel:
    return TextModel.from_files("tiny", "f" * 64, byte_level_files())


@pytest.mark.parametrize("stream", [False, True])
async def test_who_waited_in_vain_is_told_when_to_come_back(model: TextModel, stream: bool) -> None:
    engine = ScriptedEngine([NoRoomError("the mesh is busy; try again later", hop_index=1)])
    app = create_app(engine, FixedTexts({"tiny": model}), FixedMesh())
    response = await post(app, messages=USER, stream=stream)
    assert response.status_code == 429
    assert int(response.headers["Retry-After"]) >= 1
    error = response.json()["error"]
    assert (error["type"], error["code"], error["hop_index"]) == ("rate_limit_error", "cache_full", 1)
    assert "try again later" in error["message"]
    assert engine.closed == ["s-1"]


async def test_other_answers_name_no_time(model: TextModel) -> None:
    app = create_app(ScriptedEngine(), FixedTexts({"tiny": model}), FixedMesh())
    response = await post(app, messages=USER, max_tokens=0)
    assert response.status_code == 400
    assert "Retry-After" not in response.headers


async def test_waiting_shows_in_metrics_and_status() -> None:
    async def full() -> None:
        raise CacheFullError("full")

    room = WaitingRoom(ManualClock(), max_waiting=1)
    app = create_app(ScriptedEngine(), FixedTexts({}), FixedMesh(), room=room)
    waiting = asyncio.create_task(room.admit("m", 0, full))
    with pytest.raises(NoRoomError):
        await room.admit("m", 1, full)
    metrics = (await get(app, "/metrics")).text
    assert "meshnet_gateway_waiting_generations 1.0" in metrics
    assert "meshnet_gateway_waits_total 2.0" in metrics
    assert "meshnet_gateway_waits_in_vain_total 1.0" in metrics
    assert "meshnet_gateway_waited_seconds_total 0.0" in metrics
    assert (await get(app, "/v1/meshnet/status")).json()["gateway"]["waiting_for_room"] == 1
    waiting.cancel()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_done_gives_its_room_to_others_of_its_request(model: TextModel, stream: bool) -> None:
    """Where a mesh has room for one, three answers come one after the other."""
    engine = OneAtATime(tokens(model.encode("ok")))
    app = create_app(engine, FixedTexts({"tiny": model}), FixedMesh())
    async with asyncio.timeout(30):
        response = await post(app, messages=USER, n=3, stream=stream)
    assert response.status_code == 200
    assert response.text.count('"finish_reason":"stop"') == 3
    assert engine.closed == ["s-1", "s-2", "s-3"]


class OneAtATime(ScriptedEngine):
    """Each generation waits until the one before it was given back."""

    def start(self, request: GenerationRequest) -> ScriptedGeneration:
        generation = super().start(request)
        turn, done = getattr(self, "done", None), asyncio.Event()
        if turn is not None:
            generation.steps.insert(0, turn)
        self.done, close = done, generation.aclose

        async def aclose() -> None:
            await close()
            done.set()

        generation.aclose = aclose  # type: ignore[method-assign]
        return generation
