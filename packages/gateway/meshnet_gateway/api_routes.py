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
from pydantic import BaseModel

from meshnet_core import __version__
from meshnet_core.coverage import ModelSummary
from meshnet_core.errors import MeshnetError, ModelNotFoundError
from meshnet_gateway.api_answers import (
    ChatAnswer,
    CompletionAnswer,
    Health,
    MessagesAnswer,
    MessagesErrorBody,
    ModelEntry,
    ModelList,
    NotReady,
    Ready,
)
from meshnet_gateway.api_errors import ErrorBody, error_object
from meshnet_gateway.api_types import ChatRequest, CompletionRequest, GenerationFields
from meshnet_gateway.event_stream import ClientGoneError, EventStream, while_connected
from meshnet_gateway.job import Job
from meshnet_gateway.job_kinds import chat_job, completion_job, messages_job
from meshnet_gateway.jobs import Jobs, farewell, outcome_of
from meshnet_gateway.messages_shape import PATH as MESSAGES
from meshnet_gateway.messages_types import MessagesRequest
from meshnet_gateway.ports import Mesh, TextModels
from meshnet_gateway.prefix_scope import scope_of
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
_Responses = dict[int | str, dict[str, Any]]
_STRING = {"type": "string"}
_EVENT = {"type": "object", "properties": {"data": _STRING, "event": _STRING}, "required": ["data"]}
_EVENTS = {"text/event-stream": {"schema": {**_EVENT, "description": "Chunks, as server-sent events."}}}
_PLAIN: _Responses = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
_NOT_HERE = {
    "embeddings": "models here write text and give no embeddings",
    "moderations": "nothing is moderated here",
    "responses": "use /v1/chat/completions",
}


def _answers(model: type[BaseModel]) -> _Responses:
    """For the description: what a request is answered with, streamed or not."""
    return {200: {"model": model, "content": _EVENTS}}


@router.post("/v1/chat/completions", response_model=None, responses=_answers(ChatAnswer))
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """An answer to a conversation, whole or streamed."""

    async def prepare() -> Job:
        model = await door_of(request).texts.get(body.model)
        return await asyncio.to_thread(chat_job, endpoint_of(request), body, model, _scope(request, body))

    return await _answer(request, body, prepare)


@router.post("/v1/completions", response_model=None, responses=_answers(CompletionAnswer))
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Text that goes on from a prompt, whole or streamed."""

    async def prepare() -> Job:
        model = await door_of(request).texts.get(body.model)
        return await asyncio.to_thread(completion_job, endpoint_of(request), body, model, _scope(request, body))

    return await _answer(request, body, prepare)


@router.post(
    MESSAGES,
    response_model=None,
    responses={**_answers(MessagesAnswer), "4XX": {"model": MessagesErrorBody}, "5XX": {"model": MessagesErrorBody}},
)
async def messages(request: Request, body: MessagesRequest) -> Response:
    """An answer to a conversation, as Anthropic's clients ask for one."""
    chat = body.as_chat()

    async def prepare() -> Job:
        model = await door_of(request).texts.get(body.model)
        return await asyncio.to_thread(messages_job, endpoint_of(request), chat, model, _scope(request, chat))

    return await _answer(request, chat, prepare)


@router.get("/v1/models", response_model=None, responses={200: {"model": ModelList}})
async def models(request: Request) -> dict[str, Any]:
    """What the mesh serves whole."""
    door = door_of(request)
    served = {summary.name: summary for summary in await door.mesh.models() if summary.complete}
    return {"object": "list", "data": [_model(summary, door.created) for summary in served.values()]}


@router.get("/v1/models/{model:path}", response_model=None, responses={200: {"model": ModelEntry}})
async def one_model(request: Request, model: str) -> dict[str, Any]:
    """One of them; names may hold slashes."""
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


@router.get("/healthz", response_model=None, responses={200: {"model": Health}})
async def healthz() -> dict[str, Any]:
    """This process answers."""
    return {"status": "ok", "version": __version__}


@router.get("/readyz", response_model=None, responses={200: {"model": Ready}, 503: {"model": NotReady}})
async def readyz(request: Request) -> Response:
    """Whether some model can answer now: 200 or 503. Where keys are set, which or why not is told to those with one."""
    stranger = bool(getattr(request.state, "stranger", False))
    try:
        served = await door_of(request).mesh.models()
    except MeshnetError as error:
        return JSONResponse({"status": "not ready", **({} if stranger else {"reason": error.message})}, 503)
    ready = [summary.name for summary in served if summary.complete]
    if not ready:
        if stranger:
            return JSONResponse({"status": "not ready"}, 503)
        gaps = [f"{one.name} lacks layers {', '.join(map(str, one.missing))}" for one in served]
        return JSONResponse({"status": "not ready", "reason": "; ".join(gaps) or "no node serves a model"}, 503)
    return JSONResponse({"status": "ready", **({} if stranger else {"models": ready})})


@router.get("/metrics", response_class=Response, responses=_PLAIN)
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(door_of(request).figures.exposition(), media_type=CONTENT_TYPE_LATEST)


@router.post("/v1/embeddings", include_in_schema=False)
@router.post("/v1/moderations", include_in_schema=False)
@router.post("/v1/responses", include_in_schema=False)
async def not_here(request: Request) -> Response:
    """Endpoints of OpenAI's that are none of this API's: refused by name, with the reason."""
    endpoint = request.url.path.rpartition("/")[2]
    message = f"{endpoint} is not supported: {_NOT_HERE[endpoint]}"
    return JSONResponse(error_object(404, message, code="unsupported_endpoint"), 404)


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
            return EventStream(door.jobs.streamed(job), headers, farewell(job.shape))
        return JSONResponse(await door.jobs.whole(job), headers=headers)

    try:
        return await while_connected(request.receive, begun())
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)


def _scope(request: Request, body: GenerationFields) -> str:
    """Whose prefixes the request may use."""
    return scope_of(getattr(request.state, "api_key_id", None), request.headers, body.cache_key)


def endpoint_of(request: Request) -> str:
    """How the figures call the endpoint of a request for a generation."""
    return {"/v1/chat/completions": "chat", MESSAGES: "messages"}.get(request.url.path, "completions")


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
