"""What a hop costs beside the model: a decode step's time without any hop's layers and sampling, divided by hops.

    python -m benchmarks.hop_overhead [--rounds 7] [--steps 100]

Two nodes, real processes on loopback, hold halves of a small random model (hidden 576, so that bodies are SmolLM2's);
the generation engine runs here, as it does in a gateway. One mesh takes frames as posts, one on lean streams; rounds of
both are interleaved. `step` is from one token to the next, `call` from a frame's departure here to its reply. Bytes are
counted by relays before the nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import checkpoints, environment
from benchmarks.busy import QUIET_CORES, BusyWatch
from benchmarks.figures import Interval
from benchmarks.results import add_options, publish_drawn
from benchmarks.verdict import Verdict
from meshnet_cli.children import Children
from meshnet_core.clock import SystemClock
from meshnet_core.frames import Frame, FrameReply, Phase
from meshnet_core.open_document import OpenDocument, OpenReply, ProbeReply
from meshnet_core.prefix import Mark
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_core.stream_transport import WireTransport, transport_for
from meshnet_core.tracker_client import TrackerClient
from meshnet_core.wire_form import WireForm
from meshnet_gateway.generation import GenerationEngine, GenerationRequest
from meshnet_gateway.mesh import Mesh

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 576,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
SPLITS = ("0-0", "1-1")
PROMPT = tuple(range(3, 35))
BODY = 576 * 2  # of one position in bfloat16
WARM_UP = 10
HOP_MS, HOP_BYTES = 0.3, 400.0  # at most, on lean streams


@dataclass
class Watched:
    """A transport that notes of each decode step how long its call took, and what the hops said of it."""

    inner: WireTransport
    calls: list[tuple[float, FrameReply]] = field(default_factory=list)

    async def forward(self, url: str, frame: Frame) -> FrameReply:
        began = time.perf_counter()
        reply = await self.inner.forward(url, frame)
        if frame.phase is Phase.DECODE:
            self.calls.append((1000 * (time.perf_counter() - began), reply))
        return reply

    async def open(self, url: str, document: OpenDocument) -> OpenReply:
        return await self.inner.open(url, document)

    async def release(
        self, url: str, session: str, through_epoch: int | None = None, keep: tuple[Mark, ...] = ()
    ) -> int:
        return await self.inner.release(url, session, through_epoch, keep)

    async def probe(self, url: str, session: str | None) -> ProbeReply:
        return await self.inner.probe(url, session)


@dataclass
class Relay:
    """Passes bytes on between a node and whoever dials it, and counts both ways."""

    target_port: int
    passed: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        for source, sink in ((reader, up_writer), (up_reader, writer)):
            task = asyncio.create_task(self._pass(source, sink))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                self.passed += len(data)
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.close()


@dataclass
class Form:
    """One mesh, with what was measured of it; times in ms a hop."""

    form: WireForm
    mesh: Mesh
    watched: Watched
    engine: GenerationEngine
    steps: list[list[float]] = field(default_factory=list)
    calls: list[list[float]] = field(default_factory=list)

    async def round(self, steps: int) -> None:
        self.watched.calls.clear()
        (model,) = await self.mesh.models()
        request = GenerationRequest(model.name, PROMPT, steps + WARM_UP + 1, SamplingParams())
        generation = self.engine.start(request)
        told: list[float] = []
        try:
            async with aclosing(aiter(generation)) as events:
                told += [1000 * time.perf_counter() async for event in events if isinstance(event, SampledToken)]
        finally:
            await generation.aclose()
        model_ms = [sum(hop.forward_ms + hop.sample_ms for hop in reply.timings) for _, reply in self.watched.calls]
        between = [after - before for before, after in pairwise(told)]
        hops = len(SPLITS)
        self.steps.append([(a - b) / hops for a, b in zip(between, model_ms, strict=True)][WARM_UP:])
        self.calls.append([(a - b) / hops for (a, _), b in zip(self.watched.calls, model_ms, strict=True)][WARM_UP:])


@asynccontextmanager
async def mesh_of(form: WireForm, folder: Path, *, relayed: bool = False) -> AsyncIterator[tuple[Form, list[Relay]]]:
    """A mesh in one form; with ``relayed`` a relay before each node counts bytes, which costs time."""
    model = str(checkpoints.random_folder("hop-overhead", "llama", SHAPE))
    folder.mkdir()  # noqa: ASYNC240
    async with AsyncExitStack() as closing:
        children = closing.enter_context(Children(folder))
        tracker = children.start("tracker", ["tracker", "--port", "0", "--insecure"])
        children.wait_ready(tracker, timeout_s=120)
        nodes, relays = [], []
        for index, layers in enumerate(SPLITS):
            relay = Relay(free_port())
            server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
            closing.callback(server.close)
            relays.append(relay)
            arguments = ["node", model, "--layers", layers, "--tracker", str(tracker.url), "--insecure"]
            arguments += ["--port", str(relay.target_port), "--name", f"node-{index}", "--wire", form.value]
            arguments += ["--dtype", "bfloat16", "--threads", "1"]
            if relayed:
                arguments += ["--advertise", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"]
            nodes.append(children.start(f"node-{index}", arguments))
        await asyncio.to_thread(children.wait_ready, *nodes, timeout_s=300)
        clock = SystemClock()
        client = TrackerClient(str(tracker.url))
        closing.push_async_callback(client.close)
        mesh = Mesh(client, clock)
        closing.push_async_callback(mesh.close)
        transport = transport_for(form, clock)
        closing.push_async_callback(transport.close)
        watched = Watched(transport)
        yield Form(form, mesh, watched, GenerationEngine(mesh, watched, clock)), relays


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def bytes_a_step(form: WireForm, folder: Path) -> float:
    """Bytes that one more token costs at the second hop, both ways, without the body."""
    async with mesh_of(form, folder, relayed=True) as (one, relays):
        passed = []
        for steps in (20, 120):
            before = relays[1].passed
            await one.round(steps)
            passed.append(relays[1].passed - before)
    return (passed[1] - passed[0]) / 100 - BODY


def main() -> None:
    """Measure, write a table to standard error, and keep the result."""
    parser = argparse.ArgumentParser(description="What a hop costs beside the model, as posts and on lean streams.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100, help="timed steps of each form and round")
    add_options(parser, "hop-overhead")
    options = parser.parse_args()
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps are at least 1")
    console = environment.begin()
    publish_drawn(options.name, asyncio.run(measure(options, console)), console, line=options.json)


async def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="meshnet-hops-") as name:
        folder = Path(name)
        async with AsyncExitStack() as closing:
            forms = [(await closing.enter_async_context(mesh_of(form, folder / form.value)))[0] for form in WireForm]
            with BusyWatch() as busy:
                for number in range(options.rounds):
                    console.print(f"round {number + 1} of {options.rounds}", style="dim")
                    for form in forms:
                        await form.round(options.steps)
        beside = {form: await bytes_a_step(form, folder / f"relayed-{form.value}") for form in WireForm}
    print_table(forms, beside, console)
    asked = verdicts(next(form for form in forms if form.form is WireForm.STREAM), beside[WireForm.STREAM])
    for verdict in asked.values():
        console.print(verdict.shown())
    if busy.elsewhere > QUIET_CORES:
        console.print(f"DOUBTFUL: {busy.elsewhere:.2f} cores did other work meanwhile; measure on a quiet machine")
    return {
        "benchmark": "hop_overhead",
        "title": "a hop of real processes on loopback",
        "environment": environment.facts(),
        "body_bytes": BODY,
        "forms": {form.form.value: row_of(form, beside[form.form]) for form in forms},
        "verdicts": {key: verdict.to_json() for key, verdict in asked.items()},
        **busy.to_json(),
    }


def verdicts(lean: Form, beside: float) -> dict[str, Verdict]:
    """What is asked of lean streams."""
    by_rounds, bytes_beside = quantile(lean.steps, 0.5), Interval.of([beside])
    return {
        "time": Verdict(
            "ms a hop beside layers and sampling, p50, from token to token", by_rounds, HOP_MS, at_most=True
        ),
        "bytes": Verdict("bytes a token and hop beside the body of 2H", bytes_beside, HOP_BYTES, at_most=True),
    }


def print_table(forms: list[Form], beside: dict[WireForm, float], console: Console) -> None:
    """The figures for people."""
    rounds = len(forms[0].steps)
    confidence = Interval.of([0.0] * rounds).confidence
    table = Table(
        title="ms a hop beside layers and sampling; bytes a token and hop beside the body, both ways",
        caption=f"quantiles of each round, median (interval of confidence {confidence:.2f}) "
        f"of {rounds} rounds; step: from token to token, call: from a frame's departure to its reply",
    )
    for title in ("frames as", "step p50", "step p95", "call p50", "call p95", "bytes"):
        table.add_column(title, justify="left" if title == "frames as" else "right")
    for form in forms:
        cells = [quantile(times, q).brief(3) for times in (form.steps, form.calls) for q in (0.5, 0.95)]
        table.add_row(form.form.value, *cells, f"{beside[form.form]:.0f}")
    console.print(table)


def row_of(form: Form, beside: float) -> dict[str, Any]:
    return {
        "step_p50_ms": quantile(form.steps, 0.5).to_json(),
        "step_p95_ms": quantile(form.steps, 0.95).to_json(),
        "call_p50_ms": quantile(form.calls, 0.5).to_json(),
        "call_p95_ms": quantile(form.calls, 0.95).to_json(),
        "bytes_beside_body": round(beside, 1),
    }


def quantile(rounds: list[list[float]], q: float) -> Interval:
    """Over the rounds, of each round's quantile."""
    return Interval.of(sorted(times)[int(q * len(times))] for times in rounds)


if __name__ == "__main__":
    main()
