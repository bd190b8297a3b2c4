"""What a hop does with the outcome of a frame: replies at the tail, else hands it on to the next hop, again if need be.

Knows no lane and no store; that a frame was run, and in its turn, is `frame_runs`'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from meshnet_core.clock import Clock
from meshnet_core.errors import (
    BadFrameError,
    CacheMissError,
    DeadlineError,
    HopFailedError,
    HopUnreachableError,
    MeshnetError,
    MissReason,
)
from meshnet_core.frames import Frame, FrameReply
from meshnet_core.link_times import LinkTimes
from meshnet_core.transport import FrameAnswered, HopTransport, PromptTransport
from meshnet_node.hop_session import HopSession, Outcome, Run

DOWNSTREAM_MARGIN = 0.95  # of what is left of the deadline goes to the next hop, so that the hop that hung is blamed

_DELIVERED_AGAIN = (HopUnreachableError, DeadlineError, BadFrameError)  # the next hop may not have had it, or not whole


@dataclass(frozen=True, slots=True)
class _Onward:
    """A frame on its way to the next hop: to which, what, when it had come here, and when it left."""

    node_id: str
    url: str
    frame: Frame
    arrived: float
    sent_at: float


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
        keep: Callable[[HopSession, asyncio.Future[FrameReply]], None],
    ) -> None:
        self._transport = transport
        self._prompt = transport if isinstance(transport, PromptTransport) else None
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

    def deliver_soon(
        self, session: HopSession, run: Run, outcome: Outcome, arrived: float, deadline: float, done: FrameAnswered
    ) -> Callable[[], object]:
        """As `deliver`, without a task where the next hop can be sent to at once; ``done`` is told what came of it.

        What it returns makes an end of it: what ``done`` is told after that says nothing.
        """
        if session.is_tail or outcome.hidden is None:
            reply = self._at_tail(run, outcome, arrived)
            session.settle(run, reply)
            done(reply)
            return _nothing
        if self._prompt is not None and not session.undelivered_before(run):
            onward = self._onward(session, run, outcome, arrived, deadline)

            def came(answer: FrameReply | Exception) -> None:
                try:
                    if isinstance(answer, Exception):
                        done(self._failed(run, onward, answer))
                        return
                    now = self._clock.now()
                    reply = self._passed_on(run, outcome, onward, answer, now)
                    session.settle(run, reply)
                except Exception as error:  # noqa: BLE001 - it is the answer
                    done(error)
                else:
                    done(reply)
                    self._measure_link(onward, answer, now)

            if (forget := self._prompt.send(onward.url, onward.frame, came)) is not None:
                return forget
        task = asyncio.create_task(self.deliver(session, run, outcome, arrived, deadline))

        def finished(ended: asyncio.Task[FrameReply]) -> None:
            if ended.cancelled():  # by whoever has heard of its end, or by a transport that is closed
                done(CacheMissError("the way to the next hop was closed", reason=MissReason.FAILED))
                return
            error = ended.exception()
            done(error if isinstance(error, Exception) else ended.result())

        task.add_done_callback(finished)
        return task.cancel

    async def _delivered(
        self, session: HopSession, run: Run, outcome: Outcome, arrived: float, deadline: float
    ) -> FrameReply:
        if session.is_tail or outcome.hidden is None:
            return self._at_tail(run, outcome, arrived)
        for earlier in session.undelivered_before(run):  # acknowledged to the hop before, which will not send it again
            self.again(session, earlier, deadline)
            await asyncio.wait([earlier.task])
            earlier.task.result()
        onward = self._onward(session, run, outcome, arrived, deadline)
        try:
            reply = await self._transport.forward(onward.url, onward.frame)
        except MeshnetError as error:
            raise self._failed(run, onward, error)  # noqa: B904 - it is that one, or caused by it
        now = self._clock.now()
        self._measure_link(onward, reply, now)
        return self._passed_on(run, outcome, onward, reply, now)

    def _at_tail(self, run: Run, outcome: Outcome, arrived: float) -> FrameReply:
        timing = outcome.timing.whole(1000 * (self._clock.now() - arrived))
        frame = run.frame
        return FrameReply(frame.position + frame.seq_len, outcome.tokens, (timing,), self._if_draining(frame))

    def _onward(self, session: HopSession, run: Run, outcome: Outcome, arrived: float, deadline: float) -> _Onward:
        """The frame for the next hop, with what is left of the time."""
        frame, next_hop, hidden = run.frame, session.document.next_hop, outcome.hidden
        if next_hop is None or hidden is None:
            raise HopFailedError("hidden states came out of the last layer")
        now = self._clock.now()
        left_ms = int(1000 * (deadline - now) * DOWNSTREAM_MARGIN)
        if left_ms < 1:
            raise DeadlineError(f"no time was left to hand position {frame.position} to the next hop")
        onward = frame.onward(next_hop.layers.start, left_ms, hidden)
        return _Onward(next_hop.node_id, next_hop.url, onward, arrived, now)

    def _failed(self, run: Run, onward: _Onward, error: Exception) -> Exception:
        """What is told of a delivery that failed."""
        if isinstance(error, DeadlineError):
            left_ms, used_s = onward.frame.deadline_ms, onward.sent_at - onward.arrived
            if 1000 * used_s <= left_ms:
                return error
            own = DeadlineError(  # no other hop is named, so it is this one
                f"the frame at position {run.frame.position} took {used_s:.1f} s here, which left "
                f"{left_ms / 1000:.1f} s for the hops after this one ({error.message})"
            )
            own.__cause__ = error
            return own
        if isinstance(error, MeshnetError) and not isinstance(error, _DELIVERED_AGAIN):
            run.undelivered = None
        return error

    def _measure_link(self, onward: _Onward, reply: FrameReply, now: float) -> None:
        if reply.timings:
            elapsed_ms = 1000 * (now - onward.sent_at)
            self._links.took(onward.node_id, elapsed_ms, reply.timings[0].total_ms, len(onward.frame.body))

    def _passed_on(self, run: Run, outcome: Outcome, onward: _Onward, reply: FrameReply, now: float) -> FrameReply:
        """The next hop's reply, ``now``, as this hop's."""
        run.undelivered = None
        sent_bytes = len(onward.frame.body)
        timing = outcome.timing.whole(1000 * (now - onward.arrived), sent_bytes)
        draining = (*self._if_draining(run.frame), *reply.draining)
        position = run.frame.position + run.frame.seq_len
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


def _nothing() -> None:
    """The end of a delivery that is over."""
