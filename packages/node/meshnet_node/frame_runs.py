"""The runs of frames at a hop: taken in once and in order, run on the own layers, then delivered (`frame_delivery`).

A frame that fails after it began takes its session's state with it; a frame that comes again joins the run it belongs
to. Knows no opens and no HTTP; which session a frame belongs to, and whether it fits its terms, is settled before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from meshnet_core.clock import Clock
from meshnet_core.errors import (
    BadFrameError,
    CacheMissError,
    DeadlineError,
    HopUnreachableError,
    MeshnetError,
    MissReason,
)
from meshnet_core.frames import Frame, FrameReply
from meshnet_core.link_times import LinkTimes
from meshnet_core.settle import settle
from meshnet_core.transport import HopTransport
from meshnet_node.cache_store import CacheStore, SessionKey
from meshnet_node.forward_lane import LaneTiming
from meshnet_node.frame_delivery import FrameDelivery
from meshnet_node.hop_session import FrameKey, HopSession, Outcome, Run
from meshnet_node.layer_view import ForwardCancelledError
from meshnet_node.own_layers import OwnLayers, Ran
from meshnet_node.prompt_runs import PromptRuns, gone, not_done, run_limit, too_late
from meshnet_node.settled import settled

logger = logging.getLogger(__name__)

MAX_QUEUED_FRAMES = 4  # of one session at one hop; the sender waits beyond that
EARLY_HOLD_S = 10.0  # how long a frame waits for the one before it


def is_acknowledged(frame: Frame, session: HopSession) -> bool:
    """Whether a frame is answered as soon as it has its place here, before it runs.

    One that samples nothing, at every hop but the first: so each hop works on a chunk while the one before it works on
    the next. The first one answers when the second has it, which holds the gateway to the pace of its own layers.
    """
    return not frame.sample and (frame.hop_index > 0 or session.is_tail)


class FrameRuns:
    """Runs frames of the sessions in ``store``.

    Args:
        store: where the sessions are.
        own: runs frames on the own layers.
        transport: reaches the next hops.
        clock: for deadlines.
        is_draining: whether replies say that this hop's node is about to leave.
        links: take in how long posts to the next hops took.

    Attributes:
        prompt: runs those frames that need not wait for anything.
    """

    def __init__(
        self,
        *,
        store: CacheStore[HopSession],
        own: OwnLayers,
        transport: HopTransport,
        clock: Clock,
        is_draining: Callable[[], bool],
        links: LinkTimes,
    ) -> None:
        self._store = store
        self._own = own
        self._clock = clock
        self._delivery = FrameDelivery(
            transport=transport, clock=clock, is_draining=is_draining, links=links, keep=self._keep
        )
        self._background: set[asyncio.Future[Any]] = set()
        self.prompt = PromptRuns(
            store=store, own=own, delivery=self._delivery, clock=clock, keep=self._background.add, ended=self._ended
        )

    async def close(self) -> None:
        """Cancel what still runs, and wait for it."""
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def take_in(self, key: SessionKey, session: HopSession, frame: Frame, arrived: float) -> Run:
        """The run of this frame: the one that an identical frame began, or a new one in its turn."""
        frame_key = FrameKey.of(frame)
        deadline = arrived + frame.deadline_ms / 1000
        if frame_key not in session.runs:
            await self._await_turn(key, session, frame, frame_key, deadline)
        if (known := session.runs.get(frame_key)) is not None:  # a retry, or a twin that came while this one waited
            self._delivery.again(session, known, deadline)
            return known
        task = asyncio.create_task(self._run(key, session, frame, frame_key, arrived, deadline))
        run = Run(replace(frame, body=b""), len(frame.body), task)
        self._keep(session, run.task)
        session.take(frame, run)
        session.remember(frame_key, run)
        session.announce()
        return run

    async def _await_turn(
        self, key: SessionKey, session: HopSession, frame: Frame, frame_key: FrameKey, deadline: float
    ) -> None:
        """Wait until the frame is next and the queue has room, or its twin has been taken in."""
        if not frame.cache:
            if session.in_flight:
                raise BadFrameError("with the cache off one frame runs at a time")
            return
        give_up = min(deadline, self._clock.now() + EARLY_HOLD_S)
        while (
            early := not session.is_next(frame) and (frame.position > session.accepted or session.verifying is not None)
        ) or session.in_flight >= MAX_QUEUED_FRAMES:
            # Who is next and finds the queue full waits for as long as frames here may take.
            wait_s = (give_up if early else deadline) - self._clock.now()
            try:
                async with asyncio.timeout(max(0.0, wait_s)):
                    await session.changed.wait()
            except TimeoutError:
                break
            self._store.require(key, frame.epoch)  # it may have left the store meanwhile
            if frame_key in session.runs:
                return
        if not session.is_next(frame):
            raise CacheMissError(
                f"the session holds {session.accepted} positions here, the frame begins at {frame.position}",
                reason=MissReason.POSITION_MISMATCH,
            )
        if session.in_flight >= MAX_QUEUED_FRAMES:
            raise DeadlineError(f"{session.in_flight} frames of this session are still queued here")

    async def _run(
        self, key: SessionKey, session: HopSession, frame: Frame, frame_key: FrameKey, arrived: float, deadline: float
    ) -> FrameReply:
        """Run the frame on the own layers, then hand it on. Whatever goes wrong here costs the state."""
        try:
            limit = max(deadline, run_limit(session, arrived))
            outcome = await self._run_own_layers(key, session, frame, limit)
        except BaseException as error:
            self._store.drop_held(key, session, MissReason.FAILED)
            if isinstance(error, ForwardCancelledError):
                raise gone(self._store, key, frame.epoch) from error
            raise
        run = session.runs[frame_key]
        run.undelivered = None if outcome.hidden is None else outcome
        try:
            if is_acknowledged(frame, session):  # nobody would send it again: once more if the connection breaks
                with suppress(HopUnreachableError, BadFrameError):
                    return await self._delivery.deliver(session, run, outcome, arrived, max(deadline, run.deadline))
            return await self._delivery.deliver(session, run, outcome, arrived, max(deadline, run.deadline))
        except BaseException:
            if session.state is None:  # what would be delivered again is not kept; a retry runs anew
                session.runs.pop(frame_key, None)
            raise

    async def _run_own_layers(self, key: SessionKey, session: HopSession, frame: Frame, deadline: float) -> Outcome:
        late = too_late(session, frame)
        on_lane: asyncio.Future[tuple[Ran, LaneTiming]] = asyncio.get_running_loop().create_future()
        # An error of it is for the run, which may have gone before.
        on_lane.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        with ExitStack() as leases:
            try:
                async with asyncio.timeout(max(0.0, deadline - self._clock.now())), session.entering:
                    await self._own.leased(leases, key, session, frame)
            except TimeoutError as error:
                raise late from error
            self._own.hand(leases.pop_all(), key, session, frame, partial(settle, on_lane))
        try:
            if not await settled(on_lane, max(0.0, deadline - self._clock.now())):
                raise late
        finally:
            if not on_lane.done():  # whatever ends this wait ends the session: its frames need not run
                self._own.withdraw(key, frame.epoch)
        ran, timing = on_lane.result()
        self._own.measure(session, frame, timing)
        return self._own.outcome(frame, ran, timing)

    async def outcome_of(self, run: Run, key: SessionKey, frame: Frame, arrived: float) -> FrameReply:
        """Wait for a run without owning it: a caller that leaves, or whose time is up, does not take the run along.

        So a frame that waited long for its turn is not lost: the identical one joins it.
        """
        task = run.task
        if not await settled(task, max(0.0, arrived + frame.deadline_ms / 1000 - self._clock.now())):
            raise not_done(frame)
        if task.cancelled():
            raise gone(self._store, key, frame.epoch)
        return task.result()

    def _keep(self, session: HopSession, task: asyncio.Future[Any]) -> None:
        self._background.add(task)
        task.add_done_callback(partial(self._ended, session))

    def _ended(self, session: HopSession, finished: asyncio.Future[Any]) -> None:
        self._background.discard(finished)
        session.announce()  # one less in flight
        if not finished.cancelled() and (error := finished.exception()) is not None:
            level = logging.DEBUG if isinstance(error, MeshnetError) else logging.ERROR
            document = session.document
            logger.log(
                level, "a frame failed: %s", error, exc_info=error if level == logging.ERROR else None,
                extra={
                    "session": document.session, "epoch": document.epoch, "hop": document.hop_index,
                    "route": document.route,
                },
            )  # fmt: skip
