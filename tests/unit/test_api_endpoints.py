"""What the API answers besides chat text: models, health, figures, errors in OpenAI's shape, and completions."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI

import meshnet_core.errors
from api_client import USER, app_of, client_of, content_of, events_of, get, post
from meshnet_core.errors import (
    BadFrameError,
    CacheFullError,
    DrainingError,
    HopUnreachableError,
    MeshnetError,
    RequestRefusedError,
    TrackerUnreachableError,
    UnauthorizedError,
)
from meshnet_core.layer_range import LayerRange
from meshnet_gateway.api import create_app
from meshnet_gateway.api_errors import from_mesh
from meshnet_gateway.recovery import Replay
from meshnet_gateway.speculation import AUTO, OFF, Speculate
from meshnet_gateway.text_model import TextModel
from scripted_engine import FixedMesh, FixedTexts, ScriptedEngine, summary, tokens
from tiny_tokenizers import byte_level_files


@pytest.fixture(scope="module")
def model() -> TextModel:
    return TextModel.from_files("tiny", "f" * 64, byte_level_files())


def app_over(mesh: FixedMesh) -> FastAPI:
    return create_app(ScriptedEngine(), FixedTexts({}), mesh)


async def test_models_are_those_that_are_whole() -> None:
    app = app_over(FixedMesh([summary("org/tiny"), summary("part", missing=[LayerRange(2, 4)])]))
    listing = (await get(app, "/v1/models")).json()
    assert listing["object"] == "list"
    (entry,) = listing["data"]
    assert entry["id"] == "org/tiny"
    assert entry["object"] == "model"
    assert entry["owned_by"] == "meshnet"
    assert isinstance(entry["created"], int)
    assert entry["meshnet"]["layers"] == 4
    assert (await get(app, "/v1/models/org/tiny")).json() == entry
    missing = await get(app, "/v1/models/part")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_readiness_is_that_some_model_can_answer() -> None:
    assert (await get(app_over(FixedMesh([summary("tiny")])), "/readyz")).json() == {
        "status": "ready",
        "models": ["tiny"],
    }
    gap = await get(app_over(FixedMesh([summary("tiny", missing=[LayerRange(2, 4)])])), "/readyz")
    assert gap.status_code == 503
    assert gap.json()["reason"] == "tiny lacks layers 2-3"
    nothing = await get(app_over(FixedMesh([])), "/readyz")
    assert (nothing.status_code, nothing.json()["reason"]) == (503, "no node serves a model")
    lost = await get(app_over(FixedMesh(failure=TrackerUnreachableError("no tracker answers"))), "/readyz")
    assert (lost.status_code, lost.json()["reason"]) == (503, "no tracker answers")


async def test_health_status_and_figures(model: TextModel) -> None:
    engine = ScriptedEngine(tokens(model.encode("the fox")))
    app = app_of(engine, model)
    assert (await get(app, "/healthz")).json()["status"] == "ok"
    await post(app, messages=USER)
    await post(app, messages=USER, max_tokens=0)
    await post(app, messages=USER, model="other")
    status = (await get(app, "/v1/meshnet/status")).json()
    assert status["models"] == ["tiny"]
    assert status["gateway"]["requests"] == {"ok": 1, "refused": 2}
    assert status["gateway"]["active_generations"] == 0
    metrics = await get(app, "/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert 'meshnet_gateway_requests_total{endpoint="chat",outcome="ok"} 1.0' in metrics.text
    assert f'meshnet_gateway_tokens_total{{kind="prompt"}} {len(model.render_chat(USER))}.0' in metrics.text
    assert "meshnet_gateway_time_to_first_token_seconds_count 1.0" in metrics.text
    assert "meshnet_gateway_active_generations 0.0" in metrics.text


@pytest.mark.parametrize(
    ("asked", "used"), [("auto", AUTO), ("off", OFF), (5, Speculate(5, always=True)), (None, None)]
)
async def test_a_request_says_how_drafts_are_used(model: TextModel, asked: object, used: Speculate | None) -> None:
    engine = ScriptedEngine(tokens(model.encode("the fox")))
    await post(app_of(engine, model), messages=USER, meshnet={"speculate": asked})
    assert engine.requests[0].speculate == used


async def test_drafted_tokens_are_counted_and_those_that_were_right(model: TextModel) -> None:
    engine = ScriptedEngine(tokens(model.encode("the fox")), drafted_tokens=7, accepted_tokens=3)
    app = app_of(engine, model)
    await post(app, messages=USER)
    metrics = (await get(app, "/metrics")).text
    assert "meshnet_gateway_drafted_tokens_total 7.0" in metrics
    assert "meshnet_gateway_accepted_tokens_total 3.0" in metrics


async def test_recoveries_are_counted_by_error_reason_and_action(model: TextModel) -> None:
    miss = {"after_tokens": 3, "error": "cache_miss", "reason": "restarted", "action": "RePrefill", "node": "b"}
    late = {"after_tokens": 5, "error": "deadline", "action": "Reroute", "node": "b"}
    engine = ScriptedEngine(tokens(model.encode("the fox")), recoveries=[miss, miss, late])
    app = app_of(engine, model)
    await post(app, messages=USER, meshnet={"recovery": "exact"})
    assert engine.requests[0].recovery is Replay.EXACT
    metrics = (await get(app, "/metrics")).text
    counted = 'meshnet_gateway_recoveries_total{action="RePrefill",error="cache_miss",reason="restarted"} 2.0'
    assert counted in metrics
    assert 'meshnet_gateway_recoveries_total{action="Reroute",error="deadline",reason=""} 1.0' in metrics


async def test_the_apps_own_description_can_be_had() -> None:
    document = (await get(app_over(FixedMesh()), "/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= set(document["paths"])
    assert "422" not in json.dumps(document["paths"])


@pytest.mark.parametrize(
    ("content", "headers", "code"),
    [
        (b"", {"content-type": "application/json"}, "missing_required_parameter"),
        (b"not json", {"content-type": "application/json"}, "invalid_json"),
        (b'{"model": "tiny",', {"content-type": "application/json"}, "invalid_json"),
        (b"\xff\xfe\x00", {"content-type": "application/json"}, None),
        (b"[" * 100_000, {"content-type": "application/json"}, None),
        (b"[1]", {"content-type": "application/json"}, "invalid_value"),
        (b'"text"', {"content-type": "application/json"}, "invalid_value"),
        (b"null", {"content-type": "application/json"}, None),
        (b'{"model": "tiny"}', {"content-type": "text/plain"}, "invalid_value"),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', {}, "invalid_value"),
        (b'{"model": "tiny", "seed": 1' + b"0" * 5000 + b"}", {"content-type": "application/json"}, None),
    ],
)
async def test_garbage_is_a_400_in_openais_shape(
    model: TextModel, content: bytes, headers: dict[str, str], code: str | None
) -> None:
    engine = ScriptedEngine(tokens([40]))
    async with client_of(app_of(engine, model)) as client:
        for path in ("/v1/chat/completions", "/v1/completions"):
            response = await client.post(path, content=content, headers=headers)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["message"]
            if code is not None and path.endswith("chat/completions"):
                assert error["code"] == code
        assert (await client.post("/v1/chat/completions", json={"model": "tiny", "messages": USER})).status_code == 200


async def test_too_much_is_refused_before_it_is_read(model: TextModel) -> None:
    app = create_app(ScriptedEngine(), FixedTexts({"tiny": model}), FixedMesh(), max_body=1000)
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        while taken < 1_000_000:
            taken += 100
            yield b" " * 100

    async with client_of(app) as client:
        for content in (b" " * 2000, endless()):
            response = await client.post(
                "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
            )
            assert response.status_code == 413
            assert "1000 bytes" in response.json()["error"]["message"]
    assert taken < 3000


async def test_unknown_paths_and_methods_have_openais_shape(model: TextModel) -> None:
    app = app_of(ScriptedEngine(), model)
    for path, status in (("/v1/files", 404), ("/v1/chat/completions", 405)):
        response = await get(app, path)
        assert response.status_code == status
        assert path in response.json()["error"]["message"]


async def test_a_bug_is_a_500_that_tells_nothing_of_the_inside(model: TextModel) -> None:
    engine = ScriptedEngine([ValueError("secret")])
    for stream in (False, True):
        response = await post(app_of(engine, model), messages=USER, stream=stream)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "secret" not in response.text
    engine.script = [*tokens(model.encode("the fox")), ValueError("secret")]
    response = await post(app_of(engine, model), messages=USER, stream=True)
    events = events_of(response)
    assert content_of(events) == "the fox"
    assert events[-2]["error"]["code"] == "internal"
    assert events[-1] == "[DONE]"
    assert "secret" not in response.text
    assert engine.closed == ["s-1", "s-2", "s-3"]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestRefusedError("no", param="messages"), 400, "invalid_request_error"),
        (CacheFullError("full"), 429, "rate_limit_error"),
        (DrainingError("leaving"), 503, "server_error"),
        (HopUnreachableError("gone", hop_index=1), 502, "server_error"),
        (UnauthorizedError("who"), 502, "server_error"),  # of a hop with the gateway, not of the client
        (BadFrameError("what"), 502, "server_error"),
    ],
)
def test_errors_of_the_mesh_have_the_fitting_status_and_type(error: MeshnetError, status: int, kind: str) -> None:
    found, body = from_mesh(error)
    assert (found, body["error"]["type"], body["error"]["code"]) == (status, kind, error.code)


def test_every_error_of_the_tree_becomes_an_answer() -> None:
    for _, kind in inspect.getmembers(meshnet_core.errors, inspect.isclass):
        if issubclass(kind, MeshnetError):
            fields: dict[str, Any] = {"reason": "evicted"} if "reason" in inspect.signature(kind).parameters else {}
            status, body = from_mesh(kind("what was wrong", **fields))
            assert 400 <= status < 600
            assert body["error"]["message"] == "what was wrong"


async def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(model: TextModel) -> None:
    engine = ScriptedEngine(tokens([40] * 100))
    app = app_of(engine, model)
    length = len(model.render_chat(USER))
    long = await post(app, messages=[{"role": "user", "content": "hello " * 100}])
    error = long.json()["error"]
    assert long.status_code == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    tokens_long = len(model.render_chat([{"role": "user", "content": "hello " * 100}]))
    assert f"{tokens_long} tokens" in error["message"]
    assert "64 positions" in error["message"]

    for field in ("max_tokens", "max_completion_tokens"):
        asked: dict[str, Any] = {field: 64 - length + 1}
        response = await post(app, messages=USER, **asked)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)
        assert f"{length} tokens" in error["message"]
        assert "64 positions" in error["message"]
        assert f"leaves {64 - length}" in error["message"]
    assert engine.requests == []

    assert (await post(app, messages=USER, max_tokens=64 - length)).status_code == 200
    whole = (await post(app, messages=USER)).json()
    assert engine.requests[-1].max_tokens == 64 - length
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["total_tokens"] == 64


async def test_the_engine_is_asked_for_what_the_request_says(model: TextModel) -> None:
    engine = ScriptedEngine(tokens([40]))
    app = app_of(engine, model)
    sent: dict[str, Any] = {"temperature": 0.25, "seed": 11, "top_k": 5, "max_tokens": 3, "meshnet": {"cache": "off"}}
    body = (await post(app, messages=USER, **sent)).json()
    (request,) = engine.requests
    assert request.model == "tiny"
    assert request.prompt_ids == model.render_chat(USER)
    assert request.stop_ids == model.stop_ids
    assert request.max_tokens == 3
    assert request.cache is False
    assert (request.sampling.temperature, request.sampling.seed, request.sampling.top_k) == (0.25, 11, 5)
    assert body["meshnet"]["mode"] == "stateless"
    assert body["meshnet"]["seed"] == 11


async def test_prefixes_are_the_keys_own_and_can_be_left_alone(model: TextModel) -> None:
    engine = ScriptedEngine(tokens([40]), cached_tokens=7)
    app = app_of(engine, model)
    body = (await post(app, messages=USER, max_tokens=3)).json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}
    exposition = (await get(app, "/metrics")).text
    assert 'meshnet_gateway_tokens_total{kind="prompt_cached"} 7.0' in exposition
    await post(app, messages=USER, max_tokens=3, prompt_cache_key="mine")
    await post(app, messages=USER, max_tokens=3, meshnet={"prefix": "off"})
    await post(app, messages=USER, max_tokens=3, meshnet={"cache": "off"})
    async with client_of(app) as client:
        sent = {"model": "tiny", "messages": USER, "max_tokens": 3}
        await client.post("/v1/chat/completions", json=sent, headers={"Authorization": "Bearer key"})
    await post(app, "/v1/completions", prompt="the fox", max_tokens=3)
    wishes = [request.prefix for request in engine.requests]
    assert wishes[2:4] == [None, None]
    chats = [wish for wish in (*wishes[:2], wishes[4]) if wish is not None]
    assert len({wish.scope for wish in chats}) == len(chats) == 3
    assert {wish.keep_at for wish in chats} == {chats[0].keep_at}
    assert all(0 < at < len(engine.requests[0].prompt_ids) for at in chats[0].keep_at)
    assert wishes[5] is not None


async def test_unknown_model_is_a_404_that_names_the_field(model: TextModel) -> None:
    response = await post(app_of(ScriptedEngine(), model), messages=USER, model="other")
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")


async def test_a_model_without_a_template_refuses_chat_and_takes_completions() -> None:
    plain = TextModel.from_files("tiny", "f" * 64, byte_level_files(template=None))
    app = app_of(ScriptedEngine(tokens(plain.encode(" fox"))), plain)
    refused = await post(app, messages=USER)
    assert refused.status_code == 400
    assert "no chat template" in refused.json()["error"]["message"]
    assert (await post(app, "/v1/completions", prompt="the")).json()["choices"][0]["text"] == " fox"
