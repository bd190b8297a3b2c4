"""What a hop does with the outcome of a frame: replies at the tail, else hands it on to the next hop, again if need be.

Knows no lane and no store; that a frame was run, and in its turn, is `frame_runs`'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from meshnet_core.clock import Clock
from meshnet_core.errors import BadFrameError, DeadlineError, HopUnreachableError, MeshnetError
from meshnet_core.frames import Frame, FrameReply
from meshnet_core.link_times import LinkTimes
from meshnet_core.transport import HopTransport
from meshnet_node.hop_session import HopSession, Outcome, Run

DOWNSTREAM_MARGIN = 0.95  # of what is left of the deadline goes to the next hop, so that the hop that hung is blamed

_DELIVERED_AGAIN = (HopUnreachableError, DeadlineError, BadFrameError)  # the next hop may not have had it, or not whole


class FrameDelivery:
    """Delivers the outcomes of frames.

    Args:
        transport: reaches the next hops.
        clock: for deadlines.
        is_draining: whether replies say that this hop's node is about to leave.
        links: take in how long posts to the next hops took.
        keep: is given each task that delivers again; it holds on to it until it is done.
    """

    def __init__(
        self,
        *,
        transport: HopTransport,
        clock: Clock,
        is_draining: Callable[[], bool],
        links: LinkTimes,
        keep: Callable[[HopSession, asyncio.Task[FrameReply]], None],
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._is_draining = is_draining
        self._links = links
        self._keep = keep

    async def deliver(
        self, session: HopSession, run: Run, outcome: Outcome, arrived: float, deadline: float
    ) -> FrameReply:
        """The reply to a frame that was run.

        The own tokens at the tail, else what the next hop answers to the hidden states.
        """
        reply = await self._delivered(session, run, outcome, arrived, deadline)
        session.settle(run, reply)
        return reply

    async def _delivered(
        self, session: HopSession, run: Run, outcome: Outcome, arrived: float, deadline: float
    ) -> FrameReply:
        frame, timing = run.frame, outcome.timing
        position = frame.position + frame.seq_len
        next_hop = session.document.next_hop
        if next_hop is None or outcome.hidden is None:
            timing = replace(timing, total_ms=1000 * (self._clock.now() - arrived))
            return FrameReply(position, outcome.tokens, (timing,), self._if_draining(frame))
        for earlier in session.undelivered_before(run):  # acknowledged to the hop before, which will not send it again
            self.again(session, earlier, deadline)
            await asyncio.wait([earlier.task])
            earlier.task.result()
        used_s = self._clock.now() - arrived
        left_ms = int(1000 * (deadline - self._clock.now()) * DOWNSTREAM_MARGIN)
        if left_ms < 1:
            raise DeadlineError(f"no time was left to hand position {frame.position} to the next hop")
        onward = replace(
            frame,
            hop_index=frame.hop_index + 1,
            start_layer=next_hop.layers.start,
            deadline_ms=left_ms,
            body=outcome.hidden,
        )
        sent_at = self._clock.now()
        try:
            reply = await self._transport.forward(next_hop.url, onward)
        except DeadlineError as error:
            if 1000 * used_s <= left_ms:
                raise
            raise DeadlineError(  # no other hop is named, so it is this one
                f"the frame at position {frame.position} took {used_s:.1f} s here, which left {left_ms / 1000:.1f} s "
                f"for the hops after this one ({error.message})"
            ) from error
        except MeshnetError as error:
            if not isinstance(error, _DELIVERED_AGAIN):
                run.undelivered = None
            raise
        run.undelivered = None
        if reply.timings:
            elapsed_ms = 1000 * (self._clock.now() - sent_at)
            self._links.took(next_hop.node_id, elapsed_ms, reply.timings[0].total_ms, len(outcome.hidden))
        timing = replace(timing, total_ms=1000 * (self._clock.now() - arrived), sent_bytes=len(outcome.hidden))
        draining = (*self._if_draining(frame), *reply.draining)
        return FrameReply(position, reply.tokens, (timing, *reply.timings), draining)

    def again(self, session: HopSession, run: Run, deadline: float) -> None:
        """Of a frame whose own part went well but whose delivery failed, only the delivery runs again."""
        run.deadline = max(run.deadline, deadline)
        if not run.task.done() or run.undelivered is None or run.task.cancelled():
            return
        if isinstance(run.task.exception(), _DELIVERED_AGAIN):
            delivery = self.deliver(session, run, run.undelivered, self._clock.now(), deadline)
            run.task = asyncio.create_task(delivery)
            self._keep(session, run.task)

    def _if_draining(self, frame: Frame) -> tuple[int, ...]:
        """What a reply says of this hop where its node is about to leave."""
        return (frame.hop_index,) if self._is_draining() else ()
