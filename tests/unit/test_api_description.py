"""The OpenAPI document against the API: what it describes is answered as it says, and nothing is a 500."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from api_client import app_of, get, post
from meshnet_gateway.text_model import TextModel
from scripted_engine import ScriptedEngine, tokens
from tiny_tokenizers import byte_level_files

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
MODES = schemathesis.GenerationMode
OPERATIONS = [
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/messages", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{model}", "GET"),
    ("/v1/meshnet/status", "GET"),
    ("/healthz", "GET"),
    ("/readyz", "GET"),
    ("/metrics", "GET"),
]
SETTINGS = settings(deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
LONG = 2000  # cases, of the long suite; most for the two endpoints that take a body


@functools.cache
def app() -> FastAPI:
    model = TextModel.from_files("tiny", "f" * 64, byte_level_files())
    return app_of(ScriptedEngine(tokens(model.encode("the fox 你好"))), model)


@functools.cache
def description() -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", app())


def run_cases(path: str, method: str, count: int) -> int:
    """Send ``count`` cases of one operation, half of them against its description; how many were sent."""
    sent = itertools.count()
    operation = description()[path][method]

    def send(mode: Any, data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy(generation_mode=mode))
        if isinstance(case.body, dict) and data.draw(st.booleans()):
            case.body["model"] = "tiny"  # else almost none would come as far as an answer
        case.call_and_validate(checks=CHECKS)
        next(sent)

    for mode in (MODES.POSITIVE, MODES.NEGATIVE):
        if mode is MODES.POSITIVE or method == "POST":  # a GET without parameters has no wrong ones
            drawn = given(st.sampled_from([mode]), st.data())(send)
            settings(SETTINGS, max_examples=max(1, count // 2))(drawn)()
    return next(sent)


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_what_is_described_is_answered_as_it_says(path: str, method: str) -> None:
    run_cases(path, method, 40 if method == "POST" else 4)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_500_in_2000_cases() -> None:
    sent = sum(run_cases(path, method, 700) for path, method in OPERATIONS[:3])
    sent += sum(run_cases(path, method, 60) for path, method in OPERATIONS[3:])
    assert sent >= LONG


def test_the_description_is_complete() -> None:
    document = app().openapi()
    described = {(path, method.upper()) for path, item in document["paths"].items() for method in item}
    assert described == set(OPERATIONS)
    for path, method in OPERATIONS:
        operation = document["paths"][path][method.lower()]
        assert operation["description"]
        assert operation["responses"]["4XX"]["content"]["application/json"]["schema"]["$ref"].endswith("ErrorBody")
        (media, *_), content = operation["responses"]["200"]["content"], operation["responses"]["200"]["content"]
        assert content[media]["schema"], path


async def test_what_is_not_here_is_refused_by_name() -> None:
    for endpoint in ("embeddings", "moderations", "responses"):
        response = await post(app(), f"/v1/{endpoint}", input="hello")
        assert response.status_code == 404
        error = response.json()["error"]
        assert error["code"] == "unsupported_endpoint"
        assert error["message"].startswith(f"{endpoint} is not supported: ")
    assert (await get(app(), "/v1/files")).json()["error"]["message"] == "Not Found: GET /v1/files"
