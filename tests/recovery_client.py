"""Generations over a fleet of real nodes, below the level of text, with something done to the nodes in mid-answer.

Greedy, with the real model: the answer is the undisturbed one, whatever happens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from meshnet_core.clock import SystemClock
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_core.stream_transport import WireTransport, transport_for
from meshnet_core.tracker_client import TrackerClient
from meshnet_core.wire_form import WireForm
from meshnet_gateway.generation import Generation, GenerationEngine, GenerationRequest
from meshnet_gateway.mesh import Mesh
from node_fleet import NodeFleet, RoutesOver
from process_mesh import fetch_json
from smollm2 import reference_tokenizer

HEADS, TAILS = ("head-a", "head-b"), ("tail-a", "tail-b")
LAYERS = {**dict.fromkeys(HEADS, "0-14"), **dict.fromkeys(TAILS, "15-29")}
QUESTION = "Why is the sky blue?"
COUNT = 24
PATIENT_S, SHORT_S = 60.0, 6.0  # step deadlines: longer than any step of a busy machine, and worth sitting out
SLACK_S = 20.0  # what a busy machine may need beyond that, well below what nobody would have waited for


@cache
def prompt_of(text: str) -> tuple[int, ...]:
    """Token ids of a question, by the model's template."""
    rendered = reference_tokenizer().apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return tuple(reference_tokenizer()(rendered, add_special_tokens=False)["input_ids"])


@dataclass
class Answer:
    """Token ids, with the generation's report."""

    ids: list[int]
    report: dict[str, Any]

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        return list(self.report["recoveries"])

    @property
    def nodes(self) -> list[str]:
        return [hop["node"] for hop in self.report["route"]]


During = Callable[[Generation, int], Awaitable[None]]


@dataclass
class Client:
    """Runs generations over the nodes of a fleet."""

    routes: RoutesOver
    transport: WireTransport

    def engine(self, deadline_s: float = PATIENT_S) -> GenerationEngine:
        """One that blames nobody yet."""
        return GenerationEngine(self.routes, self.transport, SystemClock(), step_deadline_s=deadline_s)

    async def answer(
        self,
        *,
        deadline_s: float = PATIENT_S,
        during: During | None = None,
        names: Sequence[str] = (),
        count: int = COUNT,
        engine: GenerationEngine | None = None,
    ) -> Answer:
        """One greedy answer; ``during(generation, tokens so far)`` runs after each token.

        Each is made by an engine of its own, if none is given, so that nobody is blamed for what an earlier test did.
        """
        if names:
            self.routes.names = set(names)
        engine = engine or self.engine(deadline_s)
        (model,) = await self.routes.mesh.models()
        generation = engine.start(GenerationRequest(model.name, prompt_of(QUESTION), count, SamplingParams()))
        ids: list[int] = []
        try:
            async for event in generation:
                if isinstance(event, SampledToken):
                    ids.append(event.id)
                    if during is not None:
                        await during(generation, len(ids))
        finally:
            await generation.aclose()
        return Answer(ids, generation.report())


@asynccontextmanager
async def client_of(fleet: NodeFleet) -> AsyncIterator[Client]:
    """A client of the fleet's mesh."""
    clock = SystemClock()
    tracker, transport = TrackerClient(fleet.tracker_url), transport_for(WireForm.STREAM, clock)
    mesh = Mesh(tracker, clock)
    try:
        yield Client(RoutesOver(mesh, set(LAYERS)), transport)
    finally:
        await mesh.close()
        await transport.close()
        await tracker.close()


_undisturbed: list[list[int]] = []


async def undisturbed(client: Client) -> list[int]:
    """The answer when nothing happens."""
    if not _undisturbed:
        answer = await client.answer()
        assert answer.recoveries == []
        _undisturbed.append(answer.ids)
    return _undisturbed[0]


async def sessions(fleet: NodeFleet) -> dict[str, int]:
    """How many sessions each node that is alive holds."""
    alive = [name for name in fleet.layers if fleet.alive(name)]
    told = await asyncio.gather(*(fetch_json(f"{fleet.url(name)}/healthz") for name in alive))
    return {name: int(node["sessions"]) for name, node in zip(alive, told, strict=True)}


async def soon_empty(fleet: NodeFleet, seconds: float = SLACK_S) -> float:
    """Wait until no node holds a session, long before its time to live ends; how long it took."""
    began = time.monotonic()
    while any((held := await sessions(fleet)).values()):
        assert time.monotonic() - began < seconds, f"still held after {seconds:g} s: {held}"
        await asyncio.sleep(0.05)
    return time.monotonic() - began


def at_token(moment: int, act: Callable[[Generation], Awaitable[object]]) -> During:
    """``act`` once, after the token of that number."""

    async def during(generation: Generation, made: int) -> None:
        if made == moment:
            await act(generation)

    return during
