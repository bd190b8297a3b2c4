"""Plans routes beside the event loop, one after the other, over the directory as it is when each begins."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from meshnet_core.frames import PROTOCOLS

if TYPE_CHECKING:
    from meshnet_core.demand import Demand
    from meshnet_core.route import Route
    from meshnet_tracker.directory import Directory
    from meshnet_tracker.worker import Worker


class RouteDesk:
    """Answers who asks for a route.

    Args:
        directory: the nodes.
        worker: plans; each plan knows the routes that were given out before it.
    """

    def __init__(self, directory: Directory, worker: Worker) -> None:
        self._directory = directory
        self._worker = worker
        self._turn = asyncio.Lock()

    async def plan(
        self,
        model: str,
        excluded: frozenset[str] = frozenset(),
        fingerprint: str | None = None,
        protocols: range = PROTOCOLS,
        demand: Demand | None = None,
    ) -> Route:
        """As `Directory.plan`, its errors included."""
        async with self._turn:
            planning = self._directory.planning(model, excluded, fingerprint, protocols, demand)
            route = await self._worker.run(planning)
            self._directory.took(route)
            return route
