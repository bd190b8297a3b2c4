"""A bound on request bodies, as plain ASGI middleware: 413 before more than that is held in memory."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshnet_gateway.api_errors import error_object
from meshnet_gateway.messages_shape import error_for


class BodyLimit:
    """Answers 413 to requests whose body is longer than ``max_body`` bytes, announced or not."""

    def __init__(self, app: ASGIApp, max_body: int) -> None:
        self._app = app
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_body:
            await self._refuse(scope, receive, send)
            return
        taken, answered = 0, False

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_body:
                raise _TooLong
            return message

        async def watched(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            await self._app(scope, counted, watched)
        except _TooLong:
            if answered:
                raise
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the request body is longer than the {self._max_body} bytes that this gateway takes"
        body = error_for(scope["path"], 413, error_object(413, message, code="too_large"))
        await JSONResponse(body, 413, headers={"connection": "close"})(scope, receive, send)


class _TooLong(BaseException):
    """Not an `Exception`: FastAPI answers those with a 400 of its own while it reads a body."""
