"""API keys: who is let in to /v1 and to all that tells of the mesh, and how often each."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request

from api_client import USER, client_of
from meshnet_cli.access import KeyOptions, client_key, headers_with, keys_for
from meshnet_core.clock import ManualClock
from meshnet_core.doorkeeper import Doorkeeper
from meshnet_core.errors import InvalidInputError, TrackerUnreachableError
from meshnet_core.layer_range import LayerRange
from meshnet_gateway.api import create_app
from meshnet_gateway.api_keys import ApiKeys
from scripted_engine import FixedMesh, FixedTexts, ScriptedEngine, summary

KEY, OTHER = "k-0123456789abcdef", "k-fedcba9876543210"
EVERYWHERE = "0.0.0.0"  # noqa: S104


def app_with(keys: ApiKeys | None, doorkeeper: Doorkeeper | None = None) -> FastAPI:
    return create_app(
        ScriptedEngine([]), FixedTexts({}), FixedMesh([summary("tiny")]), keys=keys, doorkeeper=doorkeeper
    )


async def get(app: FastAPI, path: str, key: str | None = None) -> httpx.Response:
    async with client_of(app) as client:
        return await client.get(path, headers=headers_with(key))


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/v1/meshnet/status", "/metrics", "/openapi.json"])
async def test_all_but_the_health_needs_a_key(path: str) -> None:
    app = app_with(ApiKeys([OTHER, KEY]))
    assert (await get(app, path, KEY)).status_code == 200
    assert (await get(app, "/healthz")).status_code == 200
    for wrong in (None, "k-0123456789abcdee", KEY + "x", KEY[:-1], "", "ä" * 20):
        headers = {} if wrong is None else {"Authorization": f"Bearer {wrong}".encode()}
        async with client_of(app) as client:
            answer = await client.get(path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)
        assert "Authorization: Bearer" in error["message"]
        assert KEY not in answer.text


async def test_without_a_key_readiness_is_told_and_nothing_of_the_mesh() -> None:
    app = app_with(ApiKeys([KEY]))
    stranger = await get(app, "/readyz")
    assert (stranger.status_code, stranger.json()) == (200, {"status": "ready"})
    assert (await get(app, "/readyz", KEY)).json() == {"status": "ready", "models": ["tiny"]}
    assert (await get(app, "/readyz", KEY + "x")).status_code == 401
    gap = create_app(
        ScriptedEngine(), FixedTexts({}), FixedMesh([summary("tiny", missing=[LayerRange(2, 4)])]), keys=ApiKeys([KEY])
    )
    lost = create_app(
        ScriptedEngine(),
        FixedTexts({}),
        FixedMesh(failure=TrackerUnreachableError("no tracker at 10.0.0.5 answers")),
        keys=ApiKeys([KEY]),
    )
    for app in (gap, lost):
        answer = await get(app, "/readyz")
        assert (answer.status_code, answer.json()) == (503, {"status": "not ready"})
        assert (await get(app, "/readyz", KEY)).json()["reason"]
        assert set((await get(app, "/healthz")).json()) == {"status", "version"}


async def test_a_chat_without_a_key_is_not_even_read() -> None:
    app = app_with(ApiKeys([KEY]))
    async with client_of(app) as client:
        answer = await client.post("/v1/chat/completions", content=b"{" * 100_000)
        known = await client.post(
            "/v1/chat/completions", json={"model": "none", "messages": USER}, headers=headers_with(KEY)
        )
    assert (answer.status_code, known.status_code) == (401, 404)


async def test_without_keys_everybody_is_let_in() -> None:
    assert (await get(app_with(None), "/v1/models")).status_code == 200


async def test_whose_key_it_was_is_known_further_in() -> None:
    app = app_with(ApiKeys([KEY, OTHER]))

    @app.get("/whose")
    async def whose(request: Request) -> dict[str, str]:
        return {"id": request.state.api_key_id}

    told = [(await get(app, "/whose", key)).json()["id"] for key in (KEY, OTHER, KEY)]
    assert told[0] == told[2] != told[1]
    assert all(len(one) == 16 for one in told)
    assert KEY not in told


async def test_who_is_refused_is_counted_by_reason(caplog: pytest.LogCaptureFixture) -> None:
    doorkeeper = Doorkeeper(ManualClock(), per_s=100, burst=100)
    app = app_with(ApiKeys([KEY]), doorkeeper)
    await get(app, "/v1/models")
    await get(app, "/v1/models", OTHER)
    await get(app, "/v1/models", OTHER)
    assert (doorkeeper.turned_away["no_key"], doorkeeper.turned_away["wrong_key"]) == (1, 2)
    assert 'meshnet_gateway_turned_away_total{reason="wrong_key"} 2.0' in (await get(app, "/metrics", KEY)).text
    assert "(wrong_key)" in caplog.text
    assert OTHER not in caplog.text


async def test_one_key_used_too_often_leaves_the_others_alone() -> None:
    clock = ManualClock()
    app = app_with(ApiKeys([KEY, OTHER]), Doorkeeper(clock, per_s=0.5, burst=3))
    answers = await asyncio.gather(*(get(app, "/v1/models", KEY) for _ in range(4)))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 429]
    late = next(answer for answer in answers if answer.status_code == 429)
    assert late.headers["Retry-After"] == "2"
    assert (late.json()["error"]["type"], late.json()["error"]["code"]) == ("rate_limit_error", "rate_limited")
    assert (await get(app, "/v1/models", OTHER)).status_code == 200
    clock.advance(2)
    assert (await get(app, "/v1/models", KEY)).status_code == 200


# -- where keys come from ----------------------------------------------------------------------------------------------


def test_a_gateway_for_other_machines_wants_a_key_or_a_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="--api-keys-file FILE or MESHNET_API_KEY"):
        keys_for(EVERYWHERE, KeyOptions(), insecure=False)
    assert keys_for(EVERYWHERE, KeyOptions(), insecure=True) is None
    assert keys_for(EVERYWHERE, KeyOptions(none=True), insecure=False) is None
    assert keys_for("127.0.0.1", KeyOptions(), insecure=False) is None
    file = tmp_path / "keys"
    file.write_text(f"# for the kitchen\n{KEY}\n\n")
    file.chmod(0o600)
    keys = keys_for(EVERYWHERE, KeyOptions([OTHER], file), insecure=False)
    assert keys is not None
    assert None not in (keys.identify(KEY.encode()), keys.identify(OTHER.encode()))
    assert keys.identify(b"") is None
    monkeypatch.setenv("MESHNET_API_KEY", f"{KEY}, {OTHER}")
    keys = keys_for("127.0.0.1", KeyOptions(), insecure=False)
    assert keys is not None
    assert keys.identify(OTHER.encode()) is not None
    assert client_key() == KEY


def test_a_file_that_others_can_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text(KEY)
    file.chmod(0o644)
    assert keys_for("127.0.0.1", KeyOptions(file=file), insecure=False) is not None
    assert "chmod 600" in caplog.text


def test_a_file_without_keys_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none yet\n")
    with pytest.raises(InvalidInputError, match="holds no key"):
        keys_for("127.0.0.1", KeyOptions(file=tmp_path / "keys"), insecure=False)


@pytest.mark.parametrize("key", ["short", "with blanks in the key", "ä" * 20, "tab\tin the middle"])
def test_a_key_that_is_none_is_refused(key: str) -> None:
    with pytest.raises(InvalidInputError, match="at least 16"):
        ApiKeys([key])
