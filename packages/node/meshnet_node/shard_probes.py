"""Measures shards that nobody uses, with a few decode steps of nobody's session, so that routes know them.

A node that was slow for a while gets no traffic that would show that it recovered, and a new one is only guessed at. So
both measure themselves, off the users' path: never while a frame waits, never a shard that would have to be loaded.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from meshnet_core.clock import Clock
from meshnet_core.dtypes import TOKEN_ID_BYTES, computed_in, dtype_bytes
from meshnet_node.forward_lane import ForwardLane
from meshnet_node.offered_shard import LoadedShard
from meshnet_node.shard_pool import ShardPool
from meshnet_node.shard_work import ShardResult, ShardWork

logger = logging.getLogger(__name__)

ROUND_S = 10.0  # between two rounds, less up to a half
STALE_S = 10.0  # a shard that decoded since then needs no probe
MEASURED_STEPS = 2  # after one that fetches the weights into the caches, as a session's first step does


class ShardProbes:
    """Measures the shards of one node.

    Args:
        shards: those that are loaded are measured.
        lane: runs the steps.
        clock: tells how old a measurement is.
        sleep: waits so many seconds.
        draw: a number in [0, 1), for the jitter.
    """

    def __init__(
        self,
        shards: ShardPool,
        lane: ForwardLane,
        clock: Clock,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._shards = shards
        self._lane = lane
        self._clock = clock
        self._sleep = sleep
        self._draw = draw

    async def run(self) -> None:
        """Measure in rounds, the first one at once; ends only by being cancelled."""
        while True:
            await self.round()
            await self._sleep(ROUND_S * (1 - 0.5 * self._draw()))

    async def round(self) -> None:
        """Measure each loaded shard that has not decoded lately, unless frames wait."""
        for offer in self._shards:
            shard = offer.shard
            if shard is None or not self._is_stale(shard):
                continue
            if self._lane.queued:
                return
            try:
                await self._measure(shard)
            except Exception as error:  # noqa: BLE001 - a shard that was dropped meanwhile, or cannot run one step alone
                logger.debug("%s could not be measured: %s", offer, error)
            finally:
                self._lane.forget(self)  # whoever comes next has the lane alone

    def _is_stale(self, shard: LoadedShard) -> bool:
        behind = shard.decode_ms.evidence(self._clock.now())
        return behind is None or behind.age_s >= STALE_S

    async def _measure(self, shard: LoadedShard) -> None:
        backend = shard.backend
        start = backend.layers.start
        state = backend.new_state(start)
        width = TOKEN_ID_BYTES if not start else backend.hidden_size * dtype_bytes(backend.dtype)
        for position in range(1 + MEASURED_STEPS):
            work = ShardWork(
                start=start,
                state=state,
                position=position,
                seq_len=1,
                payload=bytes(width),
                wire_dtype=computed_in(backend.dtype),
                sample=1 if backend.layers.stop == backend.num_layers else 0,
            )
            _, timing = await self._lane.run(self, backend, work, _as_it_is)
            if position:
                shard.measure(len(backend.layers), 1, True, timing.forward_s, self._clock.now(), position)


def _as_it_is(result: ShardResult) -> ShardResult:
    return result
