"""Traces, where they are switched on: by ``--traces``, or by OpenTelemetry's own environment variables. Off, nothing of
OpenTelemetry is imported."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from meshnet_core import __version__
from meshnet_core.errors import InvalidInputError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from meshnet_core.clock import Clock
    from meshnet_gateway.generation_trace import Tracing

TRACES_PATH = "/v1/traces"  # https://opentelemetry.io/docs/specs/otlp/#otlphttp-request
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_QUEUE = "OTEL_BSP_MAX_QUEUE_SIZE"
_QUEUED_SPANS = 65536  # a long answer ends with thousands of them


def endpoint_of(given: str | None, environment: Mapping[str, str]) -> str | None:
    """Where spans are sent, or "" for where OpenTelemetry's variables say; None where traces are off.

    Args:
        given: ``--traces``: ``otlp://host:port``, or a URL of OTLP over HTTP.
        environment: ``OTEL_…`` variables among it; they count where nothing is given.

    Raises:
        InvalidInputError: ``given`` is no such address.
    """
    if given is None:
        off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
        off |= environment.get("OTEL_TRACES_EXPORTER", "otlp") == "none"
        return None if off or not any(environment.get(name) for name in _ENDPOINTS) else ""
    parts = urlsplit(given)
    try:
        well_formed = parts.scheme in {"otlp", "http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        well_formed = False
    if not well_formed or parts.query or parts.fragment:
        raise InvalidInputError(
            f"--traces {given!r} is no address of a collector; write one like otlp://127.0.0.1:4318 "
            "(OTLP over HTTP), or https://collector.example/v1/traces"
        )
    scheme = "http" if parts.scheme == "otlp" else parts.scheme
    path = parts.path if parts.path not in {"", "/"} else TRACES_PATH
    return f"{scheme}://{parts.netloc}{path}"


@asynccontextmanager
async def tracing_to(given: str | None, clock: Clock) -> AsyncIterator[Tracing | None]:
    """Traces of a gateway while the block runs, sent out in batches; None where they are off.

    Raises:
        InvalidInputError: the address is none, or OpenTelemetry is not installed.
    """
    endpoint = endpoint_of(given, os.environ)
    if endpoint is None:
        yield None
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from meshnet_gateway.otel_tracing import OtelTracing
    except ImportError as error:
        raise InvalidInputError(
            "traces need OpenTelemetry, which is not installed here: pip install 'meshnet[traces]', or leave --traces "
            f"and the OTEL_EXPORTER_… variables out ({error})"
        ) from error

    named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "meshnet-gateway"}
    provider = TracerProvider(resource=Resource.create({**named, "service.version": __version__}))
    exporter = OTLPSpanExporter(endpoint=endpoint or None)
    queue = None if _QUEUE in os.environ else _QUEUED_SPANS
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=queue))
    try:
        yield OtelTracing(provider.get_tracer("meshnet", __version__), clock)
    finally:
        await asyncio.to_thread(provider.shutdown)  # sends what is left


def follow_callers(app: FastAPI) -> None:
    """Have generations belong to the traces of those who ask for them."""
    from meshnet_gateway.otel_tracing import TraceParent

    app.add_middleware(TraceParent)
