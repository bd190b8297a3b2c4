"""Announces a node at once when its measured speed changed, rather than at its next heartbeat. Measures nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from meshnet_core.membership import NodeInfo

LOOK_S = 1.0
CHANGE = 0.3  # of what was told last, up or down


class SpeedWatch:
    """Watches one node.

    Args:
        describe: the node as it is now.
        announce: tells it to the trackers.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        describe: Callable[[], NodeInfo],
        announce: Callable[[], Awaitable[object]],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._describe = describe
        self._announce = announce
        self._sleep = sleep
        self._told: NodeInfo | None = None

    async def run(self) -> None:
        """Look again and again; ends only by being cancelled."""
        while True:
            await self.look()
            await self._sleep(LOOK_S)

    async def look(self) -> None:
        """Announce the node if it is not as it was when this did so last."""
        now = self._describe()
        if self._told is not None and changed(self._told, now):
            await self._announce()
        elif self._told is not None:
            return
        self._told = now


def changed(before: NodeInfo, now: NodeInfo) -> bool:
    """Whether some shard's decode steps take so much longer or shorter that routes may be others."""
    told = {(shard.fingerprint, shard.layers): shard.decode_ms for shard in before.shards}
    measured = ((shard.decode_ms, told.get((shard.fingerprint, shard.layers))) for shard in now.shards)
    return any(ms is not None and (was is None or abs(ms - was) > CHANGE * min(ms, was)) for ms, was in measured)
