"""The API's paths: OpenAI's, and those for people and machines that watch. Errors become answers in `api`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from meshnet_core import __version__
from meshnet_core.coverage import ModelSummary
from meshnet_core.errors import MeshnetError, ModelNotFoundError
from meshnet_gateway.api_errors import ErrorBody
from meshnet_gateway.api_types import ChatRequest, CompletionRequest, GenerationFields
from meshnet_gateway.event_stream import ClientGoneError, EventStream, while_connected
from meshnet_gateway.job_kinds import chat_job, completion_job
from meshnet_gateway.jobs import FAREWELL, Job, Jobs, outcome_of
from meshnet_gateway.ports import Mesh, TextModels
from meshnet_gateway.status import GatewayFigures

CLIENT_GONE = 499  # nginx's status for it; nobody reads it, but access logs show it


@dataclass(frozen=True, slots=True)
class Door:
    """What the routes work with."""

    jobs: Jobs
    texts: TextModels
    mesh: Mesh
    figures: GatewayFigures
    created: int = field(default_factory=lambda: int(time.time()))


def door_of(request: Request) -> Door:
    """What the app of a request works with."""
    door = request.app.state.door
    if not isinstance(door, Door):
        raise TypeError("this app was not made by create_app")
    return door


router = APIRouter(responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}})
_STREAM_TOO: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


@router.post("/v1/chat/completions", response_model=None, responses=_STREAM_TOO)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """An answer to a conversation, whole or streamed."""

    async def prepare() -> Job:
        model = await door_of(request).texts.get(body.model)
        return await asyncio.to_thread(chat_job, endpoint_of(request), body, model)

    return await _answer(request, body, prepare)


@router.post("/v1/completions", response_model=None, responses=_STREAM_TOO)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Text that goes on from a prompt, whole or streamed."""

    async def prepare() -> Job:
        model = await door_of(request).texts.get(body.model)
        return await asyncio.to_thread(completion_job, endpoint_of(request), body, model)

    return await _answer(request, body, prepare)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """What the mesh serves whole."""
    door = door_of(request)
    served = {summary.name: summary for summary in await door.mesh.models() if summary.complete}
    return {"object": "list", "data": [_model(summary, door.created) for summary in served.values()]}


@router.get("/v1/models/{model:path}")
async def one_model(request: Request, model: str) -> dict[str, Any]:
    door = door_of(request)
    for summary in await door.mesh.models():
        if summary.name == model and summary.complete:
            return _model(summary, door.created)
    raise ModelNotFoundError(f"the mesh serves no model {model!r}; GET /v1/models lists what it serves")


@router.get("/v1/meshnet/status")
async def status(request: Request) -> dict[str, Any]:
    """The mesh (nodes, layers, sessions, state bytes) and this gateway."""
    door = door_of(request)
    return {**await door.mesh.status(), "gateway": door.figures.to_json()}


@router.get("/healthz")
async def healthz() -> dict[str, Any]:
    """This process answers."""
    return {"status": "ok", "version": __version__}


@router.get("/readyz", response_model=None)
async def readyz(request: Request) -> Response:
    """Whether some model can answer now: 200 or 503."""
    try:
        served = await door_of(request).mesh.models()
    except MeshnetError as error:
        return JSONResponse({"status": "not ready", "reason": error.message}, 503)
    ready = [summary.name for summary in served if summary.complete]
    if not ready:
        gaps = [f"{one.name} lacks layers {', '.join(map(str, one.missing))}" for one in served]
        return JSONResponse({"status": "not ready", "reason": "; ".join(gaps) or "no node serves a model"}, 503)
    return JSONResponse({"status": "ready", "models": ready})


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    return Response(door_of(request).figures.exposition(), media_type=CONTENT_TYPE_LATEST)


async def _answer(request: Request, body: GenerationFields, prepare: Callable[[], Awaitable[Job]]) -> Response:
    door = door_of(request)

    async def begun() -> Response:
        try:
            job = await prepare()
        except MeshnetError as error:
            door.figures.ended(endpoint_of(request), outcome_of(error))
            raise
        headers = {"x-request-id": job.shape.id}
        if body.stream:
            return EventStream(door.jobs.streamed(job), headers, FAREWELL)
        return JSONResponse(await door.jobs.whole(job), headers=headers)

    try:
        return await while_connected(request.receive, begun())
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)


def endpoint_of(request: Request) -> str:
    """How the figures call the endpoint of a request for a generation."""
    return "chat" if request.url.path.endswith("/chat/completions") else "completions"


def _model(summary: ModelSummary, created: int) -> dict[str, Any]:
    return {
        "id": summary.name,
        "object": "model",
        "created": created,
        "owned_by": "meshnet",
        "meshnet": {
            "fingerprint": summary.fingerprint,
            "layers": summary.num_layers,
            "max_positions": summary.max_positions,
            "dtypes": list(summary.dtypes),
        },
    }
