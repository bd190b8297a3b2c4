"""One answer of an engine, timed token by token."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Any

from meshnet_core.sampling import SampledToken
from meshnet_gateway.generation import GenerationEngine, GenerationRequest


async def timed_answer(
    engine: GenerationEngine, request: GenerationRequest
) -> tuple[list[float], list[int], dict[str, Any]]:
    """Seconds from the start to each token, the tokens, and the generation's report."""
    times: list[float] = []
    tokens: list[int] = []
    began = time.perf_counter()
    generation = engine.start(request)
    try:
        async with aclosing(aiter(generation)) as events:
            async for event in events:
                if isinstance(event, SampledToken):
                    times.append(time.perf_counter() - began)
                    tokens.append(event.id)
        report: dict[str, Any] = generation.report()
    finally:
        await generation.aclose()
    return times, tokens, report
