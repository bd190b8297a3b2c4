"""Generations as OpenTelemetry spans; imported only where traces are switched on (ADR-0018).

All spans are the gateway's: what hops say of a frame with its reply (`HopTiming`) is laid into the time that the frame
took, in the middle where only a length is known. So no clocks are compared, and no frame carries a header for it.

    generation ── model ── place ──┬─ route      ── prefill ── chunk ── decode step ── decode step ── ...
                                   └─ open                                  └ hop 0 ──┬─ queue
                                                                                      ├─ forward
                                                                                      └─ hop 1 ── ... sample
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Receive, Scope, Send

from meshnet_core.clock import Clock
from meshnet_core.errors import MeshnetError
from meshnet_core.frames import Frame, FrameReply, HopTiming, Phase
from meshnet_core.route import Route
from meshnet_gateway.generation_trace import NO_TRACE, GenerationTrace

_Attributes = Mapping[str, str | int | float | bool]

_STEPS = {Phase.DECODE: "decode step", Phase.VERIFY: "verify step"}


class OtelTracing:
    """Makes a trace for each generation, under the span that is current, if there is one.

    Args:
        tracer: makes spans.
        clock: the engine's.
        wall_ns: nanoseconds since 1970.
    """

    def __init__(self, tracer: Tracer, clock: Clock, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._tracer = tracer
        self._clock = clock
        self._wall_ns = wall_ns

    def begin(self, session: str, model: str, prompt_tokens: int) -> GenerationTrace:
        now, at_ns = self._clock.now(), self._wall_ns()
        about: _Attributes = {
            "meshnet.session": session,
            "meshnet.model": model,
            "meshnet.prompt_tokens": prompt_tokens,
        }
        root = self._tracer.start_span("generation", kind=SpanKind.INTERNAL, attributes=about, start_time=at_ns)
        if not root.is_recording():
            return NO_TRACE
        return _OtelTrace(self._tracer, self._clock, root, at_ns - round(now * 1e9))


class _OtelTrace:
    def __init__(self, tracer: Tracer, clock: Clock, root: Span, offset_ns: int) -> None:
        self._tracer = tracer
        self._clock = clock
        self._offset_ns = offset_ns
        self._open = [root]  # the generation and the parts that are under way, outermost first
        self._delivered_s = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        span = self._start(name, self._open[-1], self._clock.now())
        self._open.append(span)
        try:
            yield
        except (GeneratorExit, asyncio.CancelledError):
            raise
        except BaseException as error:
            span.set_status(Status(StatusCode.ERROR, _code(error)))
            raise
        finally:
            self._open.remove(span)
            span.end(self._ns(self._clock.now()))

    def delivering(self) -> AbstractContextManager[None]:
        return self._delivering()

    @contextmanager
    def _delivering(self) -> Iterator[None]:
        began = self._clock.now()
        try:
            yield
        finally:
            if len(self._open) == 1:  # within a part it is the part's
                self._delivered_s += self._clock.now() - began

    def frame(self, frame: Frame, route: Route, began: float, reply: FrameReply | None) -> None:
        ended = self._clock.now()
        name = _STEPS.get(frame.phase, "prefill chunk")
        about = {"meshnet.epoch": frame.epoch, "meshnet.position": frame.position, "meshnet.positions": frame.seq_len}
        span = self._start(name, self._open[-1], began, about)
        if reply is None:
            span.set_status(Status(StatusCode.ERROR))
        elif reply.timings:
            self._hops(span, route, reply.timings, began, ended)
        span.end(self._ns(ended))

    def _hops(self, parent: Span, route: Route, timings: Sequence[HopTiming], began: float, ended: float) -> None:
        """The hop that ``timings`` begins with, between ``began`` and ``ended``, and the later ones within it."""
        timing, later = timings[0], timings[1:]
        took = min(timing.total_ms / 1000, ended - began)
        at = began + (ended - began - took) / 2  # as long there as back
        until = at + took
        if timing.hop_index >= len(route.hops):
            return
        hop = route.hops[timing.hop_index]
        about: _Attributes = {
            "meshnet.hop": timing.hop_index,
            "meshnet.node": hop.node_id,
            "meshnet.layers": str(hop.layers),
            "meshnet.sent_bytes": timing.sent_bytes,
        }
        span = self._start(f"hop {timing.hop_index}", parent, at, about)
        parts = (("queue", timing.queue_ms), ("forward", timing.forward_ms), ("sample", timing.sample_ms))
        for name, length_ms in parts:
            if length_ms > 0:
                end = min(at + length_ms / 1000, until)
                self._start(name, span, at, {"meshnet.node": hop.node_id}).end(self._ns(end))
                at = end
        if later:
            self._hops(span, route, later, at, until)
        span.end(self._ns(until))

    def end(self, *, tokens: int, finish_reason: str | None) -> None:
        root = self._open[0]
        root.set_attribute("meshnet.completion_tokens", tokens)
        root.set_attribute("meshnet.delivering_s", self._delivered_s)
        if finish_reason is None:
            root.set_status(Status(StatusCode.ERROR, "it did not end by itself"))
        else:
            root.set_attribute("meshnet.finish_reason", finish_reason)
        root.end(self._ns(self._clock.now()))

    def _start(self, name: str, parent: Span, at: float, attributes: _Attributes | None = None) -> Span:
        within = trace.set_span_in_context(parent)
        return self._tracer.start_span(name, within, attributes=attributes, start_time=self._ns(at))

    def _ns(self, at: float) -> int:
        return self._offset_ns + round(at * 1e9)


class TraceParent:
    """ASGI middleware: generations belong to the trace that a client's W3C ``traceparent`` header names."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        wanted = (b"traceparent", b"tracestate")
        carrier = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in wanted}
        token = otel_context.attach(self._propagator.extract(carrier))
        try:
            await self._app(scope, receive, send)
        finally:
            otel_context.detach(token)


def _code(error: BaseException) -> str:
    """What an error is called; its message stays in the log."""
    return error.code if isinstance(error, MeshnetError) else type(error).__name__
