"""A generation's spans: what they are, that they add up, and that nothing of it is there while traces are off."""

from __future__ import annotations

import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import pytest
from fastapi import FastAPI
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

from api_client import USER, client_of
from in_process_mesh import MODEL, RecordingTransport, TinyMesh, random_prompt, tiny_mesh
from meshnet_cli.tracing import endpoint_of, follow_callers, tracing_to
from meshnet_core.clock import Clock, ManualClock, SystemClock
from meshnet_core.coverage import ModelSummary
from meshnet_core.demand import Demand
from meshnet_core.errors import InvalidInputError, LayersUnavailableError
from meshnet_core.frames import Frame, FrameReply, HopTiming, Phase
from meshnet_core.layer_range import LayerRange
from meshnet_core.open_document import OpenDocument, OpenReply
from meshnet_core.route import Hop, Route
from meshnet_core.sampling import SamplingParams
from meshnet_gateway.api import create_app
from meshnet_gateway.generation import GenerationEngine, GenerationRequest
from meshnet_gateway.generation_trace import NO_TRACE
from meshnet_gateway.otel_tracing import OtelTracing
from otlp_collector import otlp_collector
from scripted_engine import FixedMesh, FixedTexts, ScriptedEngine, summary

THREE = ["0-0", "1-1", "2-3"]
ROUTE_S, OPEN_S, HOP_S, DELIVER_S = 0.05, 0.1, 0.02, 0.005


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def tracing(spans: InMemorySpanExporter, clock: Clock) -> OtelTracing:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return OtelTracing(provider.get_tracer("test"), clock)


class SlowTransport(RecordingTransport):
    """Opens and hops take their time, by a clock that only these move."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock
        self.on_forward = lambda url, frame: clock.advance(HOP_S)

    async def open(self, url: str, document: OpenDocument) -> OpenReply:
        self.clock.advance(OPEN_S)
        return await super().open(url, document)


class SlowRoutes:
    """Those of a mesh, some time later."""

    def __init__(self, mesh: TinyMesh, clock: ManualClock) -> None:
        self._mesh, self._clock = mesh, clock
        self.model = mesh.model

    async def route(self, model: ModelSummary, excluded: frozenset[str], demand: Demand | None = None) -> Route:
        self._clock.advance(ROUTE_S)
        return await self._mesh.route(model, excluded, demand)


async def run(engine: GenerationEngine, prompt: int, count: int, clock: ManualClock | None = None) -> int:
    request = GenerationRequest(MODEL, tuple(random_prompt(prompt)), count, SamplingParams(), frozenset())
    generation, events = engine.start(request), 0
    try:
        async with aclosing(aiter(generation)) as given:
            async for _ in given:
                events += 1
                if clock is not None:
                    clock.advance(DELIVER_S)  # the client takes its time too
    finally:
        await generation.aclose()
    return events


def named(found: tuple[ReadableSpan, ...], name: str) -> list[ReadableSpan]:
    return [span for span in found if span.name == name]


def children(found: tuple[ReadableSpan, ...], parent: ReadableSpan) -> list[ReadableSpan]:
    inside = [span for span in found if span.parent is not None and span.parent.span_id == parent.context.span_id]
    return sorted(inside, key=lambda span: span.start_time or 0)


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


async def test_the_parts_of_a_generation_over_three_nodes_add_up_to_it(
    llama: Path, spans: InMemorySpanExporter
) -> None:
    clock = ManualClock(start=1000)
    async with tiny_mesh(llama, THREE, clock=clock, transport=SlowTransport(clock)) as mesh:
        engine = GenerationEngine(
            SlowRoutes(mesh, clock), mesh.transport, clock, chunk=5, tracing=tracing(spans, clock)
        )
        began = clock.now()
        await run(engine, prompt=17, count=8, clock=clock)
        took = clock.now() - began
    found = spans.get_finished_spans()
    (root,) = named(found, "generation")
    assert seconds(root) == pytest.approx(took)
    parts = children(found, root)
    assert [part.name for part in parts] == ["model", "place", "prefill", *["decode step"] * 7]
    assert root.attributes is not None
    whole = sum(map(seconds, parts)) + float(str(root.attributes["meshnet.delivering_s"]))
    assert whole == pytest.approx(seconds(root), rel=0.01)
    (place,) = named(found, "place")
    inside = {part.name: seconds(part) for part in children(found, place)}
    assert inside == {"route": pytest.approx(ROUTE_S), "open": pytest.approx(3 * OPEN_S)}
    assert [part.name for part in children(found, named(found, "prefill")[0])] == ["prefill chunk"] * 4
    for step in named(found, "decode step"):
        assert seconds(step) == pytest.approx(3 * HOP_S)


async def test_spans_reach_a_collector_before_the_gateway_ends(llama: Path) -> None:
    clock = SystemClock()
    with otlp_collector() as collector:
        async with (
            tracing_to(f"otlp://127.0.0.1:{collector.port}", clock) as traced,
            tiny_mesh(llama, THREE, clock=clock) as mesh,
        ):
            engine = mesh.engine(chunk=5)
            engine.tracing = traced
            await run(engine, prompt=12, count=6)
    assert (collector.paths, collector.services) == ({"/v1/traces"}, {"meshnet-gateway"})
    (root,) = collector.named("generation")
    parts = [span.name for span in collector.children(root)]
    assert parts == ["model", "place", "prefill", *["decode step"] * 5]
    assert len(collector.named("hop 2")) >= 6
    assert {span.trace_id for span in collector.spans} == {root.trace_id}


async def test_each_hop_of_a_step_tells_queue_forward_and_sample_within_the_hop_before(
    llama: Path, spans: InMemorySpanExporter
) -> None:
    clock = SystemClock()
    async with tiny_mesh(llama, THREE, clock=clock) as mesh:
        engine = mesh.engine()
        engine.tracing = tracing(spans, clock)
        await run(engine, prompt=9, count=4)
    found = spans.get_finished_spans()
    for step in named(found, "decode step"):
        outer, nodes = step, []
        for index in range(3):
            (hop,) = [span for span in children(found, outer) if span.name.startswith("hop")]
            assert hop.name == f"hop {index}"
            assert hop.attributes is not None
            nodes.append(hop.attributes["meshnet.node"])
            names = [span.name for span in children(found, hop) if not span.name.startswith("hop")]
            assert "forward" in names
            assert ("sample" in names) == (index == 2)
            within(hop, outer)
            for part in children(found, hop):
                within(part, hop)
            outer = hop
        assert nodes == ["node-0", "node-1", "node-2"]


def within(inner: ReadableSpan, outer: ReadableSpan) -> None:
    assert (outer.start_time or 0) <= (inner.start_time or 0) <= (inner.end_time or 0) <= (outer.end_time or 0)


async def test_no_span_tells_what_was_said(llama: Path, spans: InMemorySpanExporter) -> None:
    clock = SystemClock()
    async with tiny_mesh(llama, THREE, clock=clock) as mesh:
        engine = mesh.engine()
        engine.tracing = tracing(spans, clock)
        await run(engine, prompt=9, count=3)
    keys = {key for span in spans.get_finished_spans() for key in span.attributes or {}}
    assert keys == {
        "meshnet.session", "meshnet.model", "meshnet.prompt_tokens", "meshnet.completion_tokens",
        "meshnet.finish_reason", "meshnet.delivering_s", "meshnet.epoch", "meshnet.position", "meshnet.positions",
        "meshnet.hop", "meshnet.node", "meshnet.layers", "meshnet.sent_bytes",
    }  # fmt: skip


async def test_a_recovery_shows_as_what_failed_and_what_was_done(llama: Path, spans: InMemorySpanExporter) -> None:
    clock = SystemClock()
    async with tiny_mesh(llama, [*THREE, "2-3"], clock=clock) as mesh:
        mesh.break_at(2)
        engine = mesh.engine()
        engine.tracing = tracing(spans, clock)
        await run(engine, prompt=9, count=5)
    found = spans.get_finished_spans()
    (root,) = named(found, "generation")
    failed = [span for span in named(found, "decode step") if span.status.status_code is StatusCode.ERROR]
    assert len(failed) == 1
    assert len(named(found, "mend")) >= 1
    assert len(named(found, "place")) == 2
    assert root.status.status_code is not StatusCode.ERROR


async def test_a_generation_that_fails_ends_its_trace_with_the_errors_code(
    llama: Path, spans: InMemorySpanExporter
) -> None:
    clock = SystemClock()
    async with tiny_mesh(llama, THREE, clock=clock) as mesh:
        engine = mesh.engine(step_deadline_s=0.0)
        engine.tracing = tracing(spans, clock)
        mesh.down.add(mesh.urls[1])
        with pytest.raises(LayersUnavailableError):
            await run(engine, prompt=9, count=5)
    found = spans.get_finished_spans()
    (root,) = named(found, "generation")
    assert root.status.status_code is StatusCode.ERROR
    assert {span.status.description for span in named(found, "route")} == {"layers_unavailable"}


def test_timings_that_are_longer_than_the_frame_took_are_cut_to_it(spans: InMemorySpanExporter) -> None:
    clock = ManualClock(10)
    trace = tracing(spans, clock).begin("s-1", "tiny", 3)
    hops = tuple(Hop(f"n{at}", f"http://n{at}", LayerRange(at, at + 1), "float32", "v") for at in range(2))
    route = Route("tiny", "f" * 64, 2, hops)
    frame = Frame(
        session="s-1", epoch=0, hop_index=0, start_layer=0, phase=Phase.DECODE, position=3, seq_len=1, sample=1,
        deadline_ms=1000, cache=True, body=b"\0\0\0\0",
    )  # fmt: skip
    clock.advance(0.1)
    timings = (HopTiming(0, 5, 400, 0, 9000, 8), HopTiming(1, 0, 50, 1, 8000, 0), HopTiming(7, 0, 1, 0, 2, 0))
    trace.frame(frame, route, 10.0, FrameReply(4, timings=timings))
    trace.end(tokens=1, finish_reason="stop")
    found = spans.get_finished_spans()
    (step,) = named(found, "decode step")
    for span in found:
        assert seconds(span) <= seconds(step) + 1e-9
    assert {span.name for span in found} >= {"hop 0", "hop 1"}  # of a hop that is not in the route nothing is told
    assert not named(found, "hop 7")


def test_what_is_not_sampled_costs_no_spans(spans: InMemorySpanExporter) -> None:
    provider = TracerProvider(sampler=ALWAYS_OFF)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    assert OtelTracing(provider.get_tracer("test"), ManualClock()).begin("s-1", "tiny", 3) is NO_TRACE
    assert not spans.get_finished_spans()


async def test_a_clients_trace_goes_on_in_the_generation(spans: InMemorySpanExporter) -> None:
    seen: list[GenerationRequest] = []
    traces = tracing(spans, ManualClock())

    class Engine(ScriptedEngine):
        def start(self, request: GenerationRequest) -> object:  # type: ignore[override]
            traces.begin("s-1", "tiny", 1).end(tokens=0, finish_reason="stop")
            seen.append(request)
            return super().start(request)

    app = traced_app(Engine())
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    async with client_of(app) as client:
        for header in (f"00-{trace_id}-b7ad6b7169203331-01", "00-nonsense"):
            await client.post(
                "/v1/chat/completions", json={"model": "tiny", "messages": USER}, headers={"traceparent": header}
            )
    first, second = named(spans.get_finished_spans(), "generation")
    assert f"{first.context.trace_id:032x}" == trace_id
    assert first.parent is not None
    assert second.parent is None


def traced_app(engine: ScriptedEngine) -> FastAPI:
    from meshnet_gateway.text_model import TextModel  # noqa: PLC0415 - one test's
    from tiny_tokenizers import byte_level_files  # noqa: PLC0415

    model = TextModel.from_files("tiny", "f" * 64, byte_level_files())
    app = create_app(engine, FixedTexts({"tiny": model}), FixedMesh([summary("tiny")]))
    follow_callers(app)
    return app


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        (None, {}, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, ""),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, ""),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, None),
        ("otlp://127.0.0.1:4318", {}, "http://127.0.0.1:4318/v1/traces"),
        ("https://collector/otlp/v1/traces", {"OTEL_SDK_DISABLED": "true"}, "https://collector/otlp/v1/traces"),
    ],
)
def test_traces_are_on_where_somebody_said_so(
    given: str | None, environment: dict[str, str], expected: str | None
) -> None:
    assert endpoint_of(given, environment) == expected


@pytest.mark.parametrize("given", ["127.0.0.1:4318", "grpc://c:4317", "otlp://", "otlp://c:99999", "http://c/?x=1", ""])
def test_an_address_that_is_none_is_refused_with_one_that_is(given: str) -> None:
    with pytest.raises(InvalidInputError, match=r"otlp://127\.0\.0\.1:4318"):
        endpoint_of(given, {})


def test_off_nothing_of_opentelemetry_is_imported() -> None:
    """But for its small API package where other libraries, such as FastAPI, import it themselves."""
    program = (
        "import sys, meshnet_cli.gateway, meshnet_cli.tracing, meshnet_gateway.api, meshnet_gateway.generation\n"
        "ours = ('opentelemetry.sdk', 'opentelemetry.exporter', 'meshnet_gateway.otel_tracing')\n"
        "sys.exit(any(name.startswith(ours) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
