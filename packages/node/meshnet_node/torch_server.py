"""A node's HTTP door: a `HopEndpoint`, its status, its metrics and its text files.

Parses, answers and refuses; knows no model, no session and no tensor. What the calls mean is the endpoint's, how frames
look is `meshnet_core.http_codec`'s; those of lean streams have a door of their own, `stream_door`. The contract is in
``docs/wire-protocol.md``.

A caller that goes away does not cancel its call. A broken connection cannot be told from a kept-alive one that will be
retried in a moment, and a cancelled forward costs the session its state; so work is stopped by `release` and by the
frame's deadline, both of which the endpoint sees.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

from aiohttp import web

from meshnet_core import http_codec
from meshnet_core.clock import SystemClock
from meshnet_core.connection_log import connection_log
from meshnet_core.doorkeeper import Doorkeeper
from meshnet_core.errors import (
    BadFrameError,
    HopFailedError,
    InvalidInputError,
    MeshnetError,
    ModelNotFoundError,
    RateLimitedError,
    TooLargeError,
)
from meshnet_core.frames import PROTOCOLS
from meshnet_core.ids import check_id
from meshnet_core.secure_site import owner_of_request
from meshnet_core.transport import HopEndpoint
from meshnet_core.turned_away import TurnedAway
from meshnet_node.node_metrics import FORM_HTTP, NodeMetrics
from meshnet_node.peer_sessions import PeerSessions
from meshnet_node.stream_door import FORWARD, StreamDoor

KEEPALIVE_S = 75.0  # above the client's (`meshnet_core.http_transport`), so that it is the client that closes
BODY_TIMEOUT_S = 30.0
SHUTDOWN_S = 2.0  # for calls under way when the server stops; after it they are cancelled
# Requests of one peer: far above what a gateway with a hundred answers under way makes, or a node before this one.
RATE_PER_S, RATE_BURST = 5000.0, 20000.0
_QUERY_NAMES = {"/hop/probe": {"session"}}

log = logging.getLogger(__name__)

NotReady = Callable[[], str | None]
Status = Callable[[], dict[str, Any]]
TextFiles = Callable[[str], dict[str, bytes] | None]
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def create_app(
    endpoint: HopEndpoint,
    *,
    boot: str,
    status: Status,
    text_files: TextFiles,
    max_body: int,
    body_timeout_s: float = BODY_TIMEOUT_S,
    metrics: NodeMetrics | None = None,
    protocols: range = PROTOCOLS,
    doorkeeper: Doorkeeper | None = None,
    peers: PeerSessions | None = None,
    not_ready: NotReady = lambda: None,
    streams: bool = True,
) -> web.Application:
    """The application that answers for one node.

    Args:
        endpoint: what opens, forwards, releases and probes.
        boot: the node's boot id, sent with every answer.
        status: what ``/healthz`` tells, JSON-ready.
        text_files: the text files of the model with a fingerprint, by name; None where the node has no such model.
        max_body: bytes of body accepted.
        body_timeout_s: seconds in which a body must have arrived.
        metrics: what is counted and told at ``/metrics``; new ones if not given.
        protocols: versions of the wire protocol that the node speaks, as it announces them.
        doorkeeper: limits each peer, and counts who is turned away; a new one if not given.
        peers: limits the sessions of each peer; None for no such limit.
        not_ready: why ``/readyz`` says no; None where new sessions are welcome.
        streams: whether frames are also taken from lean streams.
    """
    doorkeeper = doorkeeper or new_doorkeeper()
    metrics = metrics or NodeMetrics(status)
    metrics.registry.register(TurnedAway("meshnet_node", doorkeeper))
    door = _Door(
        endpoint, status, text_files, max_body, body_timeout_s, metrics, protocols, doorkeeper, peers, not_ready
    )

    @web.middleware
    async def answer(request: web.Request, handler: _Handler) -> web.StreamResponse:
        response = await door.guarded(request, handler)
        response.headers[http_codec.BOOT] = boot
        return response

    app = web.Application(middlewares=[answer], client_max_size=max_body)
    app.router.add_post("/hop/open", door.open)
    app.router.add_post(FORWARD, door.forward)
    if streams:
        stream_door = StreamDoor(
            endpoint,
            metrics=metrics,
            doorkeeper=doorkeeper,
            protocols=protocols,
            max_body=max_body,
            body_timeout_s=body_timeout_s,
            idle_s=KEEPALIVE_S,
            failure=_failure,
        )
        app.router.add_get("/hop/stream", stream_door.stream, allow_head=False)
        app.on_shutdown.append(stream_door.end_streams)
    app.router.add_post("/hop/release", door.release)
    app.router.add_get("/hop/probe", door.probe, allow_head=False)
    app.router.add_get("/text/{fingerprint}", door.text, allow_head=False)
    app.router.add_get("/healthz", door.health, allow_head=False)
    app.router.add_get("/readyz", door.ready, allow_head=False)
    app.router.add_get("/metrics", door.exposition, allow_head=False)
    return app


def new_doorkeeper() -> Doorkeeper:
    """A node's, with its limits."""
    return Doorkeeper(SystemClock(), per_s=RATE_PER_S, burst=RATE_BURST)


def runner_for(app: web.Application) -> web.AppRunner:
    """What serves the application, for whoever brings the socket."""
    return web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=False,  # the module's docstring says why
        keepalive_timeout=KEEPALIVE_S,
        shutdown_timeout=SHUTDOWN_S,
        auto_decompress=False,
        logger=connection_log(__name__),
    )


class _Door:
    """The handlers, with what they share."""

    def __init__(
        self,
        endpoint: HopEndpoint,
        status: Status,
        text_files: TextFiles,
        max_body: int,
        body_timeout_s: float,
        metrics: NodeMetrics,
        protocols: range,
        doorkeeper: Doorkeeper,
        peers: PeerSessions | None,
        not_ready: NotReady,
    ) -> None:
        self._endpoint = endpoint
        self._status = status
        self._text_files = text_files
        self._max_body = max_body
        self._body_timeout_s = body_timeout_s
        self._metrics = metrics
        self._protocols = protocols
        self._doorkeeper = doorkeeper
        self._peers = peers
        self._not_ready = not_ready

    async def guarded(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """``handler``'s answer, counted; whatever it raises becomes an error document."""
        began = time.perf_counter()
        result = "cancelled"
        try:
            self._doorkeeper.admit(owner_of_request(request), request.remote or "?")
            _check_query(request)
            response = await handler(request)
        except MeshnetError as error:
            result = error.code
            refusal = _error_response(error, error.http_status)
            if isinstance(error, RateLimitedError):
                refusal.headers["Retry-After"] = str(math.ceil(error.retry_after_s))
            return refusal
        except web.HTTPException as error:
            no_route = _routing_refusal(request, error)
            result = no_route.code
            return _error_response(no_route, error.status)
        except Exception as error:  # noqa: BLE001 - it is answered and logged
            failed = _failure(error, request.path)
            result = failed.code
            return _error_response(failed, failed.http_status)
        else:
            result = "ok"
            return response
        finally:
            resource = request.match_info.route.resource
            call = "unknown" if resource is None else resource.canonical
            self._metrics.answered(call, result, time.perf_counter() - began, request.content_length or 0)

    async def open(self, request: web.Request) -> web.Response:
        body = await self._body(request, "application/json")
        http_codec.check_protocol(request.headers.items(), self._protocols)
        document = http_codec.decode_open(body)
        peer = owner_of_request(request) or request.remote or "?"
        with nullcontext() if self._peers is None else self._peers.opening(peer, document.session):
            reply = await self._endpoint.open(document)
        return _json_response(http_codec.encode_json(reply.to_wire()))

    async def forward(self, request: web.Request) -> web.Response:
        body = await self._body(request, "application/octet-stream")
        frame = http_codec.decode_frame(request.headers.items(), body, self._protocols)
        self._metrics.took(FORM_HTTP)
        reply = await self._endpoint.forward(frame)
        self._metrics.replied(reply)
        return _json_response(http_codec.encode_json(reply.to_wire()))

    async def release(self, request: web.Request) -> web.Response:
        body = await self._body(request, "application/json")
        http_codec.check_protocol(request.headers.items(), self._protocols)
        session, through_epoch, keep = http_codec.decode_release(body)
        return _json_response(http_codec.encode_released(await self._endpoint.release(session, through_epoch, keep)))

    async def probe(self, request: web.Request) -> web.Response:
        if http_codec.PROTOCOL in request.headers:  # so that a person's plain GET is answered too
            http_codec.check_protocol(request.headers.items(), self._protocols)
        session = request.query.get("session")
        reply = await self._endpoint.probe(None if session is None else check_id(session, "session"))
        return _json_response(http_codec.encode_json(reply.to_wire()))

    async def text(self, request: web.Request) -> web.Response:
        # In a thread: a tokenizer can be tens of megabytes, and frames must not wait for its encoding.
        return _json_response(await asyncio.to_thread(self._encoded_text, request.match_info["fingerprint"]))

    def _encoded_text(self, fingerprint: str) -> bytes:
        files = self._text_files(fingerprint)
        if files is None:
            raise ModelNotFoundError(f"this node serves no model with fingerprint {fingerprint[:80]!r}; ask /healthz")
        return http_codec.encode_json({name: base64.b64encode(data).decode() for name, data in files.items()})

    async def health(self, _request: web.Request) -> web.Response:
        return _json_response(http_codec.encode_json(self._status()))

    async def ready(self, _request: web.Request) -> web.Response:
        if (reason := self._not_ready()) is None:
            return _json_response(http_codec.encode_json({"status": "ready"}))
        return _json_response(http_codec.encode_json({"status": "not ready", "reason": reason}), 503)

    async def exposition(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": NodeMetrics.content_type})

    async def _body(self, request: web.Request, content_type: str) -> bytes:
        """The whole body, where its kind, its length and its arrival are as they must be."""
        length = request.content_length
        if length is None:
            raise BadFrameError(f"{request.path} needs a Content-Length; chunked bodies are not read")
        if length > self._max_body:
            raise TooLargeError(f"a body of {length} bytes is too large; this node reads at most {self._max_body}")
        if "Content-Encoding" in request.headers:
            raise BadFrameError("bodies are read as they are; send none with a Content-Encoding")
        if "Content-Type" in request.headers and request.content_type != content_type:
            raise BadFrameError(f"{request.path} takes {content_type}, not {request.content_type[:80]!r}")
        try:
            async with asyncio.timeout(self._body_timeout_s):
                return await request.read()
        except TimeoutError as error:
            raise BadFrameError(
                f"of a body of {length} bytes not all came within {self._body_timeout_s:g} s; send what was announced"
            ) from error
        except (ConnectionError, web.RequestPayloadError) as error:  # the answer is for the metrics: nobody reads it
            raise BadFrameError(f"the connection ended within a body of {length} bytes") from error


def _failure(error: Exception, path: str) -> HopFailedError:
    """What is told of an exception that nobody foresaw; whose traceback is in the log."""
    log.error("%s failed", path, exc_info=error)
    return HopFailedError(f"{type(error).__name__} in {path}; the node's log has the traceback")


def _check_query(request: web.Request) -> None:
    known = _QUERY_NAMES.get(request.path, set())
    unknown = set(request.query) - known
    if unknown:
        takes = f"takes only {', '.join(sorted(known))}" if known else "takes none"
        raise InvalidInputError(f"unknown query parameter {min(unknown)[:80]!r}; {request.path} {takes}")
    if len(request.query) > len(set(request.query)):
        raise InvalidInputError(f"a query parameter of {request.path} is there more than once; give it once")


def _json_response(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def _error_response(error: MeshnetError, status: int) -> web.Response:
    return _json_response(http_codec.encode_json(error.to_wire()), status)


def _routing_refusal(request: web.Request, error: web.HTTPException) -> MeshnetError:
    """aiohttp's own refusals of a request, in our words."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return InvalidInputError(f"{request.path} takes {allowed}, not {request.method[:20]}")
    return InvalidInputError(f"no such path: {request.path[:80]}; see docs/wire-protocol.md for those there are")
