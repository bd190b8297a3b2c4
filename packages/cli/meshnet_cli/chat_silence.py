"""What `meshnet chat` says while nothing comes: which layers of its model lack, or that it waits for room.

A gateway waits for lacking layers before it gives up: in mid-answer as long as for a step, a minute mostly, before the
answer began until the lease of whoever died has ended. It tells nothing meanwhile, since its status code would be out
then; its status tells, to whoever asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from meshnet_cli.status import silent_gaps

SILENCE_S = 3.0  # longer than a step, a retry, or the pause of a recovery that works

T = TypeVar("T")


async def watched(
    events: AsyncGenerator[T],
    on_silence: Callable[[], Awaitable[None]],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncGenerator[T]:
    """The same events, none of them later; ``on_silence`` is called once in each silence that is long."""

    async def wait() -> None:
        await sleep(SILENCE_S)
        await on_silence()

    async with aclosing(events):
        while True:
            waiting = asyncio.create_task(wait())
            try:
                event = await anext(events)
            except StopAsyncIteration:
                return
            finally:
                waiting.cancel()
                await asyncio.wait({waiting})  # what it was just saying is said
            yield event


def reason_of(document: Mapping[str, Any], model: str) -> str | None:
    """Why nothing comes, of what `GET /v1/meshnet/status` tells; None where it tells no reason."""
    for one in document.get("models", ()):
        if one["name"] == model and (gaps := one["missing_layers"] or silent_gaps(one, document["nodes"])):
            layers = ", ".join(gaps)
            return f"nobody who answers holds layers {layers}; to go on: meshnet node MODEL --layers {gaps[0]}"
    if count := document.get("gateway", {}).get("waiting_for_room"):
        return f"the nodes have no room for more sessions just now; answers that wait for it: {count}"
    return None
