"""What a gateway's dashboards look at: asked for once, however many browsers there are, and only while there is one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from meshnet_core.clock import Clock
from meshnet_core.errors import MeshnetError
from meshnet_gateway.dashboard.known_machines import KnownMachines
from meshnet_gateway.dashboard.mesh_picture import ModelPicture, pictures
from meshnet_gateway.dashboard.rate_history import RateHistory
from meshnet_gateway.live_generations import LiveGenerations

EVERY_S = 1.0
LOOKED_AT_S = 5.0  # without a look for so long nobody is there

logger = logging.getLogger(__name__)


class Watch:
    """The newest status of the mesh, and the speed of answers over time.

    Args:
        status: of the mesh; asks its nodes.
        live: the gateway's generations; asked without a detour, so that a route lights up at once.
        clock: tells the time.
        sleep: waits, in seconds.

    Attributes:
        machines: as far as they are known.
        degraded: what of the directory does not work, in words.
        trackers: each as the status has it.
        trouble: why there is no newer status; None where there is.
        asked: whether there was a status at all.
    """

    def __init__(
        self,
        status: Callable[[], Awaitable[dict[str, Any]]],
        live: LiveGenerations,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.machines = KnownMachines()
        self.speed = RateHistory()
        self.degraded: list[str] = []
        self.trackers: list[dict[str, Any]] = []
        self.trouble: str | None = None
        self.asked = False
        self.live = live
        self._status = status
        self._clock = clock
        self._sleep = sleep
        self._looked_at = float("-inf")

    def looks(self) -> tuple[ModelPicture, ...]:
        """The mesh as it is known now; says that somebody is there."""
        self._looked_at = self._clock.now()
        return pictures(self.machines.models, self.machines.nodes, self.live.to_json())

    def speeds(self) -> list[tuple[float, float]]:
        """(seconds from now, tokens per second), oldest first."""
        return self.speed.points(self._clock.now())

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look while the block runs."""
        tasks = [asyncio.create_task(self._again(self.count)), asyncio.create_task(self._again(self.ask))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def count(self) -> None:
        """Take a sample of the tokens made so far."""
        self.speed.add(self._clock.now(), self.live.tokens)

    async def ask(self) -> None:
        """Ask how the mesh is, if somebody wants to know."""
        if self._clock.now() - self._looked_at > LOOKED_AT_S:
            return
        try:
            status = await self._status()
        except MeshnetError as error:
            self.trouble = error.message
            return
        self.machines.saw(status, self._clock.now())
        self.degraded, self.trackers = list(status.get("degraded", ())), list(status.get("trackers", ()))
        self.trouble, self.asked = None, True

    async def _again(self, look: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await look()
            except Exception:  # a browser's picture that stands still is no reason to stop looking
                logger.exception("the dashboard could not look at the mesh")
            await self._sleep(EVERY_S)
