"""Answers that something happens to, on an in-process mesh."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from in_process_mesh import (
    MODEL,
    TinyMesh,
    random_prompt,
)
from meshnet_core.errors import (
    DeadlineError,
)
from meshnet_core.frames import Frame, Phase
from meshnet_core.open_document import ProbeReply
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_gateway.generation import GenerationEngine, GenerationRequest
from meshnet_gateway.recovery import (
    Replay,
)

PROMPT, COUNT = random_prompt(17), 16


async def run(
    engine: GenerationEngine, *, count: int = COUNT, replay: Replay | None = None, during: object = None
) -> tuple[list[int], dict[str, object]]:
    """One greedy answer of an engine; ``during(session, number of tokens)`` is called after each token."""
    request = GenerationRequest(MODEL, tuple(PROMPT), count, SamplingParams(), recovery=replay)
    generation = engine.start(request)
    ids: list[int] = []
    try:
        async for event in generation:
            if isinstance(event, SampledToken):
                ids.append(event.id)
                if callable(during):
                    during(generation.session, len(ids))
    finally:
        await generation.aclose()
    return ids, generation.report()


@asynccontextmanager
async def late_once(mesh: TinyMesh, url: str, queued: int, at: int) -> AsyncIterator[list[str | None]]:
    """The hop at ``url`` is past the deadline once, and says when probed that ``queued`` frames wait there."""
    probed: list[str | None] = []
    service = mesh.services[url]

    async def probe(session: str | None) -> ProbeReply:
        probed.append(session)
        return ProbeReply(service.boot, None, queued)

    def late(to: str, frame: Frame) -> None:
        if to == url and frame.phase is Phase.DECODE and frame.position == at and not probed:
            raise DeadlineError("late on purpose", hop_index=frame.hop_index)

    service.probe = probe  # type: ignore[method-assign]
    mesh.transport.on_forward = late
    yield probed
