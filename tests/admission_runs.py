"""One answer of an engine over a mesh with little room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing

from in_process_mesh import MODEL, random_prompt
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_gateway.generation import GenerationEngine, GenerationRequest

PROMPT = random_prompt(17)
COUNT = 24


async def run(
    engine: GenerationEngine,
    prompt: Sequence[int],
    count: int,
    during: Callable[[int], None] = lambda made: None,
) -> tuple[list[int], dict[str, object]]:
    """One answer of ``engine``; ``during`` is called after each token with how many there are."""
    answer = engine.start(GenerationRequest(MODEL, tuple(prompt), count, SamplingParams()))
    ids: list[int] = []
    try:
        async with aclosing(aiter(answer)) as events:
            async for event in events:
                if isinstance(event, SampledToken):
                    ids.append(event.id)
                    during(len(ids))
    finally:
        await answer.aclose()
    return ids, answer.report()


def recoveries(report: dict[str, object]) -> list[dict[str, object]]:
    events = report["recoveries"]
    assert isinstance(events, list)
    return events
