"""Two nodes (or more) as a system to compare: the gateway's own generation loop, driven with token ids.

The loop, the HTTP transport and the nodes are the ones that serve chats; only the text (tokenizer, API) is left out,
since random-weight models have none and `generate()` has none to do either.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from statistics import median
from typing import Any

from benchmarks.figures import TokenTimes
from benchmarks.memory import own_peak_rss
from benchmarks.mesh_processes import MeshProcesses
from benchmarks.systems import Run
from benchmarks.timed_answer import timed_answer
from meshnet_core.clock import SystemClock
from meshnet_core.frames import Frame, FrameReply, Phase
from meshnet_core.http_transport import HttpTransport
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_core.stream_transport import StreamTransport
from meshnet_core.tracker_client import TrackerClient
from meshnet_gateway.generation import GenerationEngine, GenerationRequest
from meshnet_gateway.mesh import Mesh
from meshnet_gateway.prefix_reuse import PrefixWish
from meshnet_gateway.speculation import OFF, Speculate


class WatchedTransport(StreamTransport):
    """The gateway's transport, on lean streams as it is by default; keeps what the hops told of each decode step, and
    how long the step took here.

    Attributes:
        steps: milliseconds of each decode step, with its reply.
        chunks: positions of each frame of a prefill.
    """

    def __init__(self) -> None:
        clock = SystemClock()
        super().__init__(HttpTransport(clock), clock)
        self.steps: list[tuple[float, FrameReply]] = []
        self.chunks: list[int] = []

    async def forward(self, url: str, frame: Frame) -> FrameReply:
        if frame.phase in {Phase.PREFILL, Phase.RESUME}:
            self.chunks.append(frame.seq_len)
        began = time.perf_counter()
        reply = await super().forward(url, frame)
        if frame.phase is Phase.DECODE:
            self.steps.append((1000 * (time.perf_counter() - began), reply))
        return reply


class MeshSystem:
    """A running mesh with a generation engine over it.

    Args:
        name: for tables.
        model: what the mesh calls the model.
    """

    def __init__(
        self, name: str, model: str, processes: MeshProcesses, engine: GenerationEngine, transport: WatchedTransport
    ) -> None:
        self.name = name
        self._model = model
        self._processes = processes
        self._engine = engine
        self._transport = transport

    async def run(
        self,
        prompt: Sequence[int],
        new_tokens: int,
        prefix: PrefixWish | None = None,
        speculate: Speculate = OFF,
    ) -> Run:
        """See `System`; the cached path. ``prefix``: what it may take from answers before it, and leave."""
        self._transport.steps.clear()
        self._transport.chunks.clear()
        times, tokens, report = await self._generate(prompt, new_tokens, cache=True, prefix=prefix, speculate=speculate)
        facts = {
            "bytes_per_step": report.get("bytes_per_step"),
            "mode": report["mode"],
            "epochs": report["epochs"],
            "cached_tokens": report["cached_tokens"],
            "drafted_tokens": report.get("drafted_tokens", 0),
            "accepted_tokens": report.get("accepted_tokens", 0),
            "chunks": list(self._transport.chunks),
            "step_ms": where_a_step_goes(self._transport.steps, times),
        }
        return Run(TokenTimes(tuple(times)), tuple(tokens), facts)

    async def token_times(self, prompt: Sequence[int], new_tokens: int, over: asyncio.Event) -> AsyncIterator[float]:
        """Answer until ``over`` is set, or for so many tokens: when each token came, by `time.perf_counter`."""
        request = GenerationRequest(self._model, tuple(prompt), new_tokens, SamplingParams())
        generation = self._engine.start(request)
        try:
            async with aclosing(aiter(generation)) as events:
                async for event in events:
                    if isinstance(event, SampledToken):
                        yield time.perf_counter()
                    if over.is_set():
                        return
        finally:
            await generation.aclose()

    def batches(self) -> dict[str, dict[int, int]]:
        """How many decode steps ran in one forward -> how often, of each node since its start."""
        found = {}
        for name, url in self._processes.node_urls.items():
            with urllib.request.urlopen(f"{url}/healthz", timeout=30) as answer:  # noqa: S310  our own nodes
                told = json.load(answer)["batches"]
            found[name] = {int(frames): int(count) for frames, count in told.items()}
        return found

    async def stateless_step_s(self, sequence: Sequence[int], steps: int) -> list[float]:
        """Seconds of each of ``steps`` stateless steps, which run the whole sequence; ``sequence`` is the first's.

        The step before them, which opens the session, is not told.
        """
        times, _, report = await self._generate(sequence[:-1] or sequence, steps + 1, cache=False)
        if report["mode"] != "stateless":
            raise RuntimeError(f"a stateless step ran in mode {report['mode']}")
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    def peak_rss(self) -> dict[str, int | None]:
        """See `System`; the driver stands for the gateway's generation loop."""
        return {**self._processes.peak_rss(), "driver": own_peak_rss()}

    async def _generate(
        self,
        prompt: Sequence[int],
        new_tokens: int,
        *,
        cache: bool,
        prefix: PrefixWish | None = None,
        speculate: Speculate = OFF,
    ) -> tuple[list[float], list[int], dict[str, Any]]:
        request = GenerationRequest(
            self._model,
            tuple(prompt),
            new_tokens,
            SamplingParams(),
            frozenset(),
            cache,
            prefix=prefix,
            speculate=speculate,
        )
        times, tokens, report = await timed_answer(self._engine, request)
        if len(tokens) != new_tokens or report["epochs"] != 1:
            raise RuntimeError(f"the mesh gave {len(tokens)} tokens instead of {new_tokens}: {report['recoveries']}")
        return times, tokens, report


@asynccontextmanager
async def mesh_system(
    name: str, model: str, processes: MeshProcesses, *, measured: bool = True
) -> AsyncIterator[MeshSystem]:
    """An engine over a running mesh, with connections of its own; without ``measured`` chunks are as long as may be."""
    clock = SystemClock()
    client, transport = TrackerClient(processes.tracker_url), WatchedTransport()
    mesh = Mesh(client, clock)
    try:
        engine = GenerationEngine(mesh, transport, clock, measured=mesh.snapshot if measured else None)
        yield MeshSystem(name, model, processes, engine, transport)
    finally:
        await transport.close()
        await mesh.close()
        await client.close()


def where_a_step_goes(steps: Sequence[tuple[float, FrameReply]], times: Sequence[float]) -> dict[str, float]:
    """Medians over the decode steps, in milliseconds, of parts that add up to the whole.

    ``hop N forward``, ``hop N queue`` (the wait for the forward lane) and ``sample`` as the hops told them; ``hops,
    rest`` is what is left of the first hop's time: parsing, hashing, handing on, and the wire between hops; ``wire``
    lies between the driver and the first hop; ``loop`` is the generation loop itself.
    """
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for seen_ms, reply in steps:
        within = 0.0
        for timing in reply.timings:
            parts[f"hop {timing.hop_index} forward"].append(timing.forward_ms)
            parts[f"hop {timing.hop_index} queue"].append(timing.queue_ms)
            within += timing.forward_ms + timing.queue_ms + timing.sample_ms
        parts["sample"].append(sum(timing.sample_ms for timing in reply.timings))
        parts["hops, rest"].append(reply.timings[0].total_ms - within)
        parts["wire"].append(seen_ms - reply.timings[0].total_ms)
    gaps = [1000 * (later - earlier) for earlier, later in itertools.pairwise(times)]
    parts["loop"] = [gap - seen for gap, (seen, _) in zip(gaps, steps, strict=False)]
    parts["whole"] = gaps
    return {name: round(median(values), 3) for name, values in parts.items() if values}
