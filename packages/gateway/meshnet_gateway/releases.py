"""Generations that are given back whatever happens to who asked for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from meshnet_core.errors import MeshnetError
from meshnet_gateway.ports import GenerationLike

logger = logging.getLogger(__name__)


class Releases:
    """Leases generations, and knows how many are not given back yet."""

    def __init__(self) -> None:
        self._leased: set[GenerationLike] = set()
        self._closing: dict[GenerationLike, asyncio.Task[None]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def active(self) -> int:
        return len(self._leased)

    @asynccontextmanager
    async def lease(self, generation: GenerationLike) -> AsyncIterator[GenerationLike]:
        """Close the generation at the end; who is cancelled once more meanwhile does not wait for that."""
        self._leased.add(generation)
        self._idle.clear()
        try:
            yield generation
        finally:
            self.let_go(generation)
            if (closing := self._closing.get(generation)) is not None:
                await asyncio.shield(closing)

    def let_go(self, generation: GenerationLike) -> None:
        """Begin to close it; the end of its lease waits for that. Idempotent."""
        if generation in self._leased and generation not in self._closing:
            self._closing[generation] = asyncio.create_task(self._close(generation))

    async def drain(self, timeout_s: float = 10.0) -> None:
        """Wait until all of them, cancelled or ended before, are given back; for a server that stops."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

    async def _close(self, generation: GenerationLike) -> None:
        try:
            await generation.aclose()
        except MeshnetError as error:
            # The answer is out; what a node still holds of it, its time to live frees.
            logger.warning("a generation was not given back on every hop: %s", error)
        finally:
            self._leased.discard(generation)
            self._closing.pop(generation, None)
            if not self._leased:
                self._idle.set()
