"""The door: OpenAI's HTTP API over the mesh, as a FastAPI app. Knows no tensors and no nodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException

from meshnet_core import __version__
from meshnet_core.clock import SystemClock
from meshnet_core.doorkeeper import Doorkeeper
from meshnet_core.errors import MeshnetError
from meshnet_core.turned_away import TurnedAway
from meshnet_gateway.api_errors import error_object, from_mesh, from_validation, retry_headers
from meshnet_gateway.api_keys import ApiKeys, KeyCheck
from meshnet_gateway.api_routes import Door, door_of, endpoint_of, router
from meshnet_gateway.body_limit import BodyLimit
from meshnet_gateway.jobs import Jobs
from meshnet_gateway.messages_shape import error_for
from meshnet_gateway.ports import Engine, Mesh, TextModels, WaitingFigures
from meshnet_gateway.releases import Releases
from meshnet_gateway.status import GatewayFigures
from meshnet_gateway.warm_up import keep_warm

logger = logging.getLogger(__name__)

RATE_PER_S, RATE_BURST = 200.0, 1000.0  # requests with one key, or from one address where there are no keys
MAX_BODY_BYTES = 32 * 1024 * 1024


def create_app(
    engine: Engine,
    texts: TextModels,
    mesh: Mesh,
    *,
    room: WaitingFigures | None = None,
    registry: CollectorRegistry | None = None,
    max_body: int = MAX_BODY_BYTES,
    keys: ApiKeys | None = None,
    doorkeeper: Doorkeeper | None = None,
) -> FastAPI:
    """The app.

    Args:
        engine: makes generations.
        texts: gives text models.
        mesh: tells what there is.
        room: where the engine's generations wait for room, for the metrics.
        registry: where metrics are registered; a new one where None.
        max_body: bytes that a request's body may have.
        keys: the API keys that are taken; None lets everybody in.
        doorkeeper: limits each key or address, and counts who is turned away; a new one if not given.
    """
    releases = Releases()
    figures = GatewayFigures(registry or CollectorRegistry(), lambda: releases.active, room)
    doorkeeper = doorkeeper or Doorkeeper(SystemClock(), per_s=RATE_PER_S, burst=RATE_BURST)
    figures.registry.register(TurnedAway("meshnet_gateway", doorkeeper))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        warming = asyncio.create_task(keep_warm(mesh, texts))
        yield
        warming.cancel()
        await asyncio.gather(warming, return_exceptions=True)
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
    app.state.door = Door(Jobs(engine, figures, releases), texts, mesh, figures)
    app.state.doorkeeper = doorkeeper
    app.include_router(router)
    app.add_middleware(BodyLimit, max_body=max_body)
    app.add_middleware(KeyCheck, keys=keys, doorkeeper=doorkeeper)  # the outermost: before anything is read
    return app


async def _invalid(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    door_of(request).figures.ended(endpoint_of(request), "refused")
    return _error(request, *from_validation(error.errors(), error.body))


async def _failed(request: Request, error: Exception) -> Response:
    if not isinstance(error, MeshnetError):
        raise error
    return _error(request, *from_mesh(error), headers=retry_headers(error))


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    message = f"{error.detail}: {request.method} {request.url.path}"
    return _error(request, error.status_code, error_object(error.status_code, message), headers=error.headers)


async def _broken(request: Request, error: Exception) -> Response:
    logger.error("a request failed", exc_info=error)
    return _error(request, 500, error_object(500, "the gateway failed; its log tells why", code="internal"))


def _error(
    request: Request, status: int, document: dict[str, Any], *, headers: Mapping[str, str] | None = None
) -> Response:
    """An error in the shape that the endpoint's clients read."""
    return JSONResponse(error_for(request.url.path, status, document), status, headers=headers)
