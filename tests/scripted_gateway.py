"""A gateway that answers from a script, in a thread of the test: for clients of the API."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from app_thread import serving_app

REPORT = {"session": "s-1", "completion_tokens": 2, "tokens_per_s": 12.5, "ttft_s": 0.25}


@dataclass
class ScriptedGateway:
    """Answers each chat with the next of ``answers``, piece by piece; what is in parentheses is thought.

    Attributes:
        answers: pieces of each answer; an exception as a piece becomes an error in the stream, None hangs.
        requests: what was asked.
        models: what is served.
        status: of the mesh.
        report: of every answer, beside what is told of any.
        key: that is to be brought; None lets everybody in.
        hung_up: set when a client leaves an answer that hangs.
    """

    answers: list[list[str | Exception | None]]
    models: list[str] = field(default_factory=lambda: ["tiny"])
    status: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    key: str | None = None
    url: str = ""
    hung_up: threading.Event = field(default_factory=threading.Event)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._let_in])
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/meshnet/status", self._status)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    @web.middleware
    async def _let_in(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            told = "this API key is not taken here; send one of its keys in the header Authorization: Bearer KEY"
            return web.json_response({"error": {"message": told, "code": "invalid_api_key"}}, status=401)
        response: web.StreamResponse = await handler(request)
        return response

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(self.status)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": meshnet prefill 3/3\n\n")
        for piece in self.answers[len(self.requests) - 1]:
            if piece is None:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    self.hung_up.set()
                    raise
            elif isinstance(piece, Exception):
                await response.write(_data({"error": {"message": str(piece), "code": "x"}}))
            else:
                field = "reasoning_content" if piece.startswith("(") else "content"
                await response.write(_data({"choices": [{"delta": {field: piece}}]}))
        await response.write(
            _data({"choices": [{"delta": {}, "finish_reason": "stop"}], "meshnet": REPORT | self.report})
        )
        await response.write(b"data: [DONE]\n\n")
        return response


def _data(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


@contextmanager
def serving(gateway: ScriptedGateway) -> Iterator[ScriptedGateway]:
    """Serve it on a free port; ``gateway.url`` is its API."""
    with serving_app(gateway.app()) as url:
        gateway.url = f"{url}/v1"
        yield gateway
