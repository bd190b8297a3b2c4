"""A stand-in for an OpenTelemetry collector: takes OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector:
    """``spans`` are those that came so far, of all services."""

    port: int = 0
    spans: list[Span] = field(default_factory=list)
    services: set[str] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)

    def take(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = [pair.value.string_value for pair in resource.resource.attributes if pair.key == "service.name"]
            self.services.update(names)
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)

    def named(self, name: str) -> list[Span]:
        return [span for span in list(self.spans) if span.name == name]

    def children(self, parent: Span) -> list[Span]:
        inside = [span for span in list(self.spans) if span.parent_span_id == parent.span_id]
        return sorted(inside, key=lambda span: span.start_time_unix_nano)


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def attribute(span: Span, key: str) -> float:
    """A number among its attributes."""
    value = next(pair.value for pair in span.attributes if pair.key == key)
    return value.double_value or float(value.int_value)


@contextmanager
def otlp_collector() -> Iterator[Collector]:
    """One on a free port of 127.0.0.1."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
