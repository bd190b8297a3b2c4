"""The steps of one epoch: sends its frames into the first hop, several at once while it prefills, again where need be.

Knows neither when an epoch begins nor what follows a failure that is more than a frame's; see `generation`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass

from meshnet_core.clock import Clock
from meshnet_core.errors import HopError
from meshnet_core.frames import Frame, FrameReply, Phase
from meshnet_core.link_times import LinkTimes
from meshnet_core.route import Route
from meshnet_core.transport import HopTransport
from meshnet_gateway.generation_trace import NO_TRACE, GenerationTrace
from meshnet_gateway.mending import Mending
from meshnet_gateway.prefill_cut import LEAST_IN_FLIGHT

REPLAYS_IN_FLIGHT = 4  # single positions are little work; a hop queues as many frames of one session


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """``done`` of ``total`` positions have been taken in by the first hop."""

    done: int
    total: int


class EpochSteps:
    """Sends the frames of one epoch.

    Args:
        route: where it is open.
        transport: reaches the hops.
        mending: says which frames are sent again.
        clock: measures.
        links: take in how long steps took on their way to the first hop.
        trace: is told of every frame.
    """

    def __init__(
        self,
        route: Route,
        transport: HopTransport,
        mending: Mending,
        clock: Clock,
        links: LinkTimes,
        trace: GenerationTrace = NO_TRACE,
    ) -> None:
        self._route = route
        self._transport = transport
        self._mending = mending
        self._clock = clock
        self._links = links
        self._trace = trace

    async def prefill(
        self, frames: Iterable[Frame], total: int, told_every: int, in_flight: int = LEAST_IN_FLIGHT
    ) -> AsyncGenerator[PrefillProgress | FrameReply]:
        """Send all frames, several in flight; progress now and then, then the last reply.

        Args:
            frames: in order, at least one.
            total: positions that they lead to.
            told_every: positions between two tidings of the progress of single ones.
            in_flight: chunks under way at once.
        """
        told = 0
        under_way: deque[tuple[int, asyncio.Task[FrameReply]]] = deque()
        try:
            for frame in frames:
                end = frame.position + frame.seq_len
                while len(under_way) >= (REPLAYS_IN_FLIGHT if frame.phase is Phase.DECODE else in_flight):
                    done, task = under_way.popleft()
                    await task
                    if frame.phase is not Phase.DECODE or done >= told + told_every:
                        told = done
                        yield PrefillProgress(done, total)
                under_way.append((end, asyncio.create_task(self.send(frame))))
            while under_way:
                done, task = under_way.popleft()
                reply = await task
                yield PrefillProgress(done, total)
            yield reply
        finally:
            for _, task in under_way:
                task.cancel()
            await asyncio.gather(*(task for _, task in under_way), return_exceptions=True)

    async def send(self, frame: Frame) -> FrameReply:
        """The reply to a frame; where recovery says so, the identical one is sent again."""
        began, reply = self._clock.now(), None
        try:
            reply = await self._answered(frame)
        finally:
            self._trace.frame(frame, self._route, began, reply)
        return reply

    async def _answered(self, frame: Frame) -> FrameReply:
        first, retries = self._route.hops[0], 0
        while True:
            try:
                sent_at = self._clock.now()
                reply = await self._transport.forward(first.url, frame)
            except HopError as failure:
                if not await self._mending.sends_again(failure, self._route, retries):
                    raise
                retries += 1
                continue
            if frame.phase in {Phase.DECODE, Phase.VERIFY} and reply.timings:
                self._links.took(first.node_id, 1000 * (self._clock.now() - sent_at), reply.timings[0].total_ms)
            return reply
