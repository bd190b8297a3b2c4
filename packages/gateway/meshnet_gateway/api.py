"""The door: OpenAI's HTTP API over the mesh, as a FastAPI app. Knows no tensors and no nodes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from starlette.exceptions import HTTPException

from meshnet_core import __version__
from meshnet_core.coverage import ModelSummary
from meshnet_core.errors import MeshnetError, ModelNotFoundError, RequestRefusedError
from meshnet_gateway.answer_shapes import AnswerShape, ChatShape, CompletionShape
from meshnet_gateway.api_errors import ErrorBody, error_object, from_mesh, from_validation
from meshnet_gateway.api_types import ChatRequest, CompletionRequest, GenerationFields
from meshnet_gateway.body_limit import BodyLimit
from meshnet_gateway.event_stream import ClientGoneError, EventStream, while_connected
from meshnet_gateway.generation import GenerationRequest
from meshnet_gateway.generations import Generations, Job, outcome_of, token_limit
from meshnet_gateway.ports import Engine, Mesh, TextModels
from meshnet_gateway.releases import Releases
from meshnet_gateway.status import GatewayFigures
from meshnet_gateway.text_model import TextModel

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 1024 * 1024
CLIENT_GONE = 499  # nginx's status for it; nobody reads it, but access logs show it


@dataclass(frozen=True, slots=True)
class Door:
    """What the routes work with."""

    generations: Generations
    texts: TextModels
    mesh: Mesh
    figures: GatewayFigures
    created: int = field(default_factory=lambda: int(time.time()))


def create_app(
    engine: Engine,
    texts: TextModels,
    mesh: Mesh,
    *,
    registry: CollectorRegistry | None = None,
    max_body: int = MAX_BODY_BYTES,
) -> FastAPI:
    """The app.

    Args:
        engine: makes generations.
        texts: gives text models.
        mesh: tells what there is.
        registry: where metrics are registered; a new one where None.
        max_body: bytes that a request's body may have.
    """
    releases = Releases()
    figures = GatewayFigures(registry or CollectorRegistry(), lambda: releases.active)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await releases.drain()  # before whoever made the engine closes its connections

    app = FastAPI(
        title="meshnet",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        exception_handlers={
            RequestValidationError: _invalid,
            MeshnetError: _failed,
            HTTPException: _http_error,
            Exception: _broken,
        },
    )
    app.state.door = Door(Generations(engine, figures, releases), texts, mesh, figures)
    app.include_router(router)
    app.add_middleware(BodyLimit, max_body=max_body)
    return app


router = APIRouter(responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}})
_STREAM_TOO: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


@router.post("/v1/chat/completions", response_model=None, responses=_STREAM_TOO)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """An answer to a conversation, whole or streamed."""

    async def prepare() -> Job:
        model = await _door(request).texts.get(body.model)
        messages = [message.for_template() for message in body.messages]
        prompt = await asyncio.to_thread(model.render_chat, messages)
        shape = ChatShape(model, bool(body.logprobs), body.include_usage)
        return _job(request, body, model, prompt, shape, "messages")

    return await _answer(request, body, prepare)


@router.post("/v1/completions", response_model=None, responses=_STREAM_TOO)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Text that goes on from a prompt, whole or streamed."""

    async def prepare() -> Job:
        model = await _door(request).texts.get(body.model)
        written = body.one_prompt
        prompt = await asyncio.to_thread(model.encode, written) if isinstance(written, str) else tuple(written)
        shape = CompletionShape(model, body.logprobs is not None, body.include_usage)
        return _job(request, body, model, prompt, shape, "prompt")

    return await _answer(request, body, prepare)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """What the mesh serves whole."""
    door = _door(request)
    served = {summary.name: summary for summary in await door.mesh.models() if summary.complete}
    return {"object": "list", "data": [_model(summary, door.created) for summary in served.values()]}


@router.get("/v1/models/{model:path}")
async def one_model(request: Request, model: str) -> dict[str, Any]:
    door = _door(request)
    for summary in await door.mesh.models():
        if summary.name == model and summary.complete:
            return _model(summary, door.created)
    raise ModelNotFoundError(f"the mesh serves no model {model!r}; GET /v1/models lists what it serves")


@router.get("/v1/meshnet/status")
async def status(request: Request) -> dict[str, Any]:
    """The mesh (nodes, layers, sessions, state bytes) and this gateway."""
    door = _door(request)
    return {**await door.mesh.status(), "gateway": door.figures.to_json()}


@router.get("/healthz")
async def healthz() -> dict[str, Any]:
    """This process answers."""
    return {"status": "ok", "version": __version__}


@router.get("/readyz", response_model=None)
async def readyz(request: Request) -> Response:
    """Whether some model can answer now: 200 or 503."""
    try:
        served = await _door(request).mesh.models()
    except MeshnetError as error:
        return JSONResponse({"status": "not ready", "reason": error.message}, 503)
    ready = [summary.name for summary in served if summary.complete]
    if not ready:
        gaps = [f"{one.name} lacks layers {', '.join(map(str, one.missing))}" for one in served]
        return JSONResponse({"status": "not ready", "reason": "; ".join(gaps) or "no node serves a model"}, 503)
    return JSONResponse({"status": "ready", "models": ready})


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    return Response(_door(request).figures.exposition(), media_type=CONTENT_TYPE_LATEST)


def _door(request: Request) -> Door:
    door = request.app.state.door
    if not isinstance(door, Door):
        raise TypeError("this app was not made by create_app")
    return door


def _job(
    http: Request, body: GenerationFields, model: TextModel, prompt: tuple[int, ...], shape: AnswerShape, param: str
) -> Job:
    if not prompt:
        raise RequestRefusedError(f"{param} makes no token; say something", param=param)
    if strays := [token for token in prompt if not 0 <= token < model.vocab_size]:
        raise RequestRefusedError(
            f"{param} holds token id {strays[0]}; those of {model.name} are from 0 to {model.vocab_size - 1}",
            param=param,
        )
    request = GenerationRequest(
        model=body.model,
        prompt_ids=prompt,
        max_tokens=token_limit(body, model, len(prompt), param),
        sampling=body.sampling(),
        stop_ids=model.stop_ids,
        cache=body.meshnet.cache == "on",
    )
    return Job(_endpoint(http), body, model, request, shape)


async def _answer(request: Request, body: GenerationFields, prepare: Callable[[], Awaitable[Job]]) -> Response:
    door = _door(request)

    async def begun() -> Response:
        try:
            job = await prepare()
        except MeshnetError as error:
            door.figures.ended(_endpoint(request), outcome_of(error))
            raise
        headers = {"x-request-id": job.shape.id}
        if body.stream:
            return EventStream(door.generations.streamed(job), headers)
        return JSONResponse(await door.generations.whole(job), headers=headers)

    try:
        return await while_connected(request.receive, begun())
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)


def _endpoint(request: Request) -> str:
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


async def _invalid(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    _door(request).figures.ended(_endpoint(request), "refused")
    code, document = from_validation(error.errors(), error.body)
    return JSONResponse(document, code)


async def _failed(_: Request, error: Exception) -> Response:
    if not isinstance(error, MeshnetError):
        raise error
    code, document = from_mesh(error)
    return JSONResponse(document, code)


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    message = f"{error.detail}: {request.method} {request.url.path}"
    return JSONResponse(error_object(error.status_code, message), error.status_code, headers=error.headers)


async def _broken(_: Request, error: Exception) -> Response:
    logger.error("a request failed", exc_info=error)
    return JSONResponse(error_object(500, "the gateway failed; its log tells why", code="internal"), 500)
