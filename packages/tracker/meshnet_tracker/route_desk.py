"""Plans routes beside the event loop, one after the other, over the directory as it is when each begins."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshnet_core.route import Route
    from meshnet_tracker.directory import Directory
    from meshnet_tracker.tracker_requests import RouteQuestion
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

    async def plan(self, question: RouteQuestion) -> Route:
        """As `Directory.plan`, its errors included."""
        async with self._turn:
            route = await self._worker.run(self._directory.planning(*question))
            self._directory.took(route)
            return route
