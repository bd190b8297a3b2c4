"""A node's door for lean streams: connections that began as a request are handed over, and their frames answered.

Each frame is admitted and counted as a post's is. Knows no model, no session and no tensor, and not how messages are
read: that is `frame_stream`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import web

from meshnet_core import http_codec, stream_codec
from meshnet_core.doorkeeper import Doorkeeper
from meshnet_core.errors import BadFrameError, MeshnetError, ProtocolMismatchError
from meshnet_core.frames import Frame, FrameReply
from meshnet_core.secure_site import owner_of_request
from meshnet_core.transport import HopEndpoint, PromptEndpoint
from meshnet_node.frame_stream import FrameStream, Send, SwitchedResponse
from meshnet_node.node_metrics import FORM_STREAM, NodeMetrics

FORWARD = "/hop/forward"  # what frames are counted as, in either form


class StreamDoor:
    """Of one node.

    Args:
        endpoint: what runs the frames.
        metrics: what is counted.
        doorkeeper: limits each peer.
        protocols: versions of the wire protocol that the node speaks.
        max_body: bytes of a frame's body accepted.
        body_timeout_s: seconds in which a message that has begun must have arrived.
        idle_s: seconds after which a stream without frames is closed.
        failure: what is told of an exception that nobody foresaw, at a path.
    """

    def __init__(
        self,
        endpoint: HopEndpoint,
        *,
        metrics: NodeMetrics,
        doorkeeper: Doorkeeper,
        protocols: range,
        max_body: int,
        body_timeout_s: float,
        idle_s: float,
        failure: Callable[[Exception, str], MeshnetError],
    ) -> None:
        self._endpoint = endpoint
        self._prompt = endpoint if isinstance(endpoint, PromptEndpoint) else None
        self._metrics = metrics
        self._doorkeeper = doorkeeper
        self._protocols = protocols
        self._max_body = max_body
        self._body_timeout_s = body_timeout_s
        self._idle_s = idle_s
        self._failure = failure
        self._streams: set[FrameStream] = set()

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Hand the connection over to a lean stream of frames."""
        if any(name.lower().startswith("x-meshnet-") for name in request.headers):  # none is needed
            http_codec.check_protocol(request.headers.items(), self._protocols)
        _check_upgrade(request)
        owner, address = owner_of_request(request), request.remote or "?"

        def answer(number: int, frame: Frame, send: Send) -> Coroutine[Any, Any, bytes] | None:
            return self._streamed(owner, address, number, frame, send)

        def make(on_lost: Callable[[Exception | None], None]) -> FrameStream:
            return FrameStream(
                answer,
                lambda error, size: self._metrics.answered(FORWARD, error.code, 0.0, size),
                protocols=self._protocols,
                max_body=self._max_body,
                body_timeout_s=self._body_timeout_s,
                idle_s=self._idle_s,
                on_lost=on_lost,
            )

        return SwitchedResponse(make, self._streams)

    async def end_streams(self, _app: web.Application) -> None:
        """Have every stream answer what it has read, and no more."""
        for stream in self._streams:
            stream.finish()

    def _streamed(
        self, owner: str | None, address: str, number: int, frame: Frame, send: Send
    ) -> Coroutine[Any, Any, bytes] | None:
        """Answer one frame of a stream, counted as a post's is; whatever is raised becomes a refusal."""
        began, size = time.perf_counter(), len(frame.body)

        def answered(outcome: FrameReply | Exception) -> None:
            message, result = self._answer_to(number, outcome)
            send(message)
            if isinstance(outcome, FrameReply):
                self._metrics.replied(outcome)
            self._metrics.answered(FORWARD, result, time.perf_counter() - began, size)

        try:
            self._doorkeeper.admit(owner, address)
            try:
                begun = self._prompt is not None and self._prompt.begin(frame, answered)
            finally:
                self._metrics.took(FORM_STREAM)
        except Exception as error:  # noqa: BLE001 - it goes back as a refusal
            answered(error)
            return None
        return None if begun else self._ran_streamed(began, number, frame)

    async def _ran_streamed(self, began: float, number: int, frame: Frame) -> bytes:
        """The answer to a frame that may have to wait."""
        result = "cancelled"
        try:
            try:
                reply = await self._endpoint.forward(frame)
                self._metrics.replied(reply)
                outcome: FrameReply | Exception = reply
            except Exception as error:  # noqa: BLE001 - it goes back as a refusal
                outcome = error
            message, result = self._answer_to(number, outcome)
            return message
        finally:
            self._metrics.answered(FORWARD, result, time.perf_counter() - began, len(frame.body))

    def _answer_to(self, number: int, outcome: FrameReply | Exception) -> tuple[bytes, str]:
        """The message that answers a frame, and what it is counted as.

        A reply that cannot be told, with a NaN among its logprobs say, is the hop's failure, and whoever asked hears of
        it.
        """
        if isinstance(outcome, FrameReply):
            try:
                return stream_codec.encode_reply(outcome, number), "ok"
            except Exception as untold:  # noqa: BLE001 - it goes back as a refusal
                outcome = untold
        error = outcome if isinstance(outcome, MeshnetError) else self._failure(outcome, FORWARD)
        return stream_codec.encode_refusal(error, number), error.code


def _check_upgrade(request: web.Request) -> None:
    """Whether a request asks for the stream that is spoken here, as an upgrade has to be asked for.

    Raises:
        ProtocolMismatchError: it asks for none, or for another one.
        BadFrameError: it has a body.
    """
    named = [part.strip().lower() for part in request.headers.get("Connection", "").split(",")]
    wanted = request.headers.getall("Upgrade", [])
    if "upgrade" not in named or wanted != [stream_codec.STREAM]:
        raise ProtocolMismatchError(
            f"/hop/stream needs Connection: Upgrade and Upgrade: {stream_codec.STREAM}, "
            f"not {', '.join(wanted)[:80] or 'none'!r}"
        )
    if request.can_read_body:
        raise BadFrameError("an upgrade has no body; frames follow the answer 101")
