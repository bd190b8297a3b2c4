"""Measures links to nodes that may come next on a route, where no frames have done so lately. Knows no frames.

A few neighbours, and small posts: never all pairs, never at the cost of traffic.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence

from meshnet_core.clock import Clock
from meshnet_core.errors import MeshnetError
from meshnet_core.link_info import Neighbour
from meshnet_core.link_times import LinkTimes
from meshnet_core.transport import HopTransport

logger = logging.getLogger(__name__)

ROUND_S = 20.0  # between two rounds, less up to a half: nodes that started together do not probe in step
STALE_S = 30.0  # a link over which a frame went since then needs no probe
TIMEOUT_S = 2.0


class LinkProbes:
    """Probes the neighbours of one node.

    Args:
        neighbours: asks for some nodes that may come next.
        transport: reaches them.
        links: take in how long it took, and tell which are known.
        clock: measures.
        sleep: waits so many seconds.
        draw: a number in [0, 1), for the jitter.
    """

    def __init__(
        self,
        neighbours: Callable[[], Awaitable[Sequence[Neighbour]]],
        transport: HopTransport,
        links: LinkTimes,
        clock: Clock,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._neighbours = neighbours
        self._transport = transport
        self._links = links
        self._clock = clock
        self._sleep = sleep
        self._draw = draw

    async def run(self) -> None:
        """Probe in rounds; ends only by being cancelled."""
        while True:
            await self._sleep(ROUND_S * (1 - 0.5 * self._draw()))
            await self.round()

    async def round(self) -> None:
        """Probe each neighbour whose link was not measured lately, one after the other."""
        try:
            neighbours = await self._neighbours()
        except MeshnetError as error:
            logger.debug("no neighbours to probe: %s", error)
            return
        for neighbour in neighbours:
            if self._links.age_s(neighbour.node_id) >= STALE_S:
                await self._probe(neighbour)

    async def _probe(self, neighbour: Neighbour) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._transport.probe(neighbour.url, None)  # opens a connection, as no later post has to
                sent_at = self._clock.now()
                await self._transport.probe(neighbour.url, None)
        except (MeshnetError, TimeoutError) as error:
            logger.debug("node %s at %s does not answer a probe: %s", neighbour.node_id, neighbour.url, error)
            return
        self._links.took(neighbour.node_id, 1000 * (self._clock.now() - sent_at), 0.0)
