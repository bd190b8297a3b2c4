"""The runs of frames at a hop: taken in once and in order, run on the own layers, then delivered (`frame_delivery`).

A frame that fails after it began takes its session's state with it; a frame that comes again joins the run it belongs
to. Knows no opens and no HTTP; which session a frame belongs to, and whether it fits its terms, is settled before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from meshnet_core.clock import Clock
from meshnet_core.errors import (
    BadFrameError,
    CacheMissError,
    DeadlineError,
    HopUnreachableError,
    MeshnetError,
    MissReason,
)
from meshnet_core.frames import Frame, FrameReply, HopTiming, Phase
from meshnet_core.link_times import LinkTimes
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_core.transport import HopTransport
from meshnet_node.cache_store import CacheStore, RoomAwaitedError, SessionKey
from meshnet_node.forward_lane import ForwardLane, LaneTiming
from meshnet_node.frame_delivery import FrameDelivery
from meshnet_node.hop_session import FrameKey, HopSession, Outcome, Run
from meshnet_node.model_backend import ForwardCancelledError, ShardResult, ShardWork
from meshnet_node.prefix_use import PrefixUse, copy_of
from meshnet_node.session_state import SessionState
from meshnet_node.settled import settled

logger = logging.getLogger(__name__)

_Ran = tuple[ShardResult, tuple[SampledToken, ...], SessionState | None]  # with a copy of the state to hold on, if any

MAX_QUEUED_FRAMES = 4  # of one session at one hop; the sender waits beyond that
EARLY_HOLD_S = 10.0  # how long a frame waits for the one before it
RUN_DEADLINES = 2  # a frame may run for this many of its steps' deadlines: one that was busy is asked for once more


class SampleFunction(Protocol):
    """`meshnet_node.sampler.sample` is one."""

    def __call__(
        self,
        logits: torch.Tensor,
        params: SamplingParams,
        history: Sequence[int],
        prompt_length: int,
        position: int,
        allowed: torch.Tensor | None = None,
        /,
    ) -> SampledToken: ...


def is_acknowledged(frame: Frame, session: HopSession) -> bool:
    """Whether a frame is answered as soon as it has its place here, before it runs.

    One that samples nothing, at every hop but the first: so each hop works on a chunk while the one before it works on
    the next. The first one answers when the second has it, which holds the gateway to the pace of its own layers.
    """
    return not frame.sample and (frame.hop_index > 0 or session.is_tail)


class FrameRuns:
    """Runs frames of the sessions in ``store``.

    Args:
        store: leases the sessions.
        prefixes: what sessions begin from, and leave to others.
        lane: runs the frames.
        transport: reaches the next hops.
        sample: chooses tokens at the tail.
        clock: for deadlines.
        is_draining: whether replies say that this hop's node is about to leave.
        links: take in how long posts to the next hops took.
    """

    def __init__(
        self,
        *,
        store: CacheStore[HopSession],
        prefixes: PrefixUse,
        lane: ForwardLane,
        transport: HopTransport,
        sample: SampleFunction,
        clock: Clock,
        is_draining: Callable[[], bool],
        links: LinkTimes,
    ) -> None:
        self._store = store
        self._prefixes = prefixes
        self._lane = lane
        self._sample = sample
        self._clock = clock
        self._delivery = FrameDelivery(
            transport=transport, clock=clock, is_draining=is_draining, links=links, keep=self._keep
        )
        self._background: set[asyncio.Task[Any]] = set()
        self._lane_left = asyncio.Event()  # set and replaced whenever a frame has left the lane, and its lease ended

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
            limit = arrived + RUN_DEADLINES * session.document.step_deadline_ms / 1000
            outcome = await self._run_own_layers(key, session, frame, max(deadline, limit))
        except BaseException as error:
            self._store.drop_held(key, session, MissReason.FAILED)
            if isinstance(error, ForwardCancelledError):
                raise self._gone(key, frame.epoch) from error
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
        shard, start = session.shard, frame.start_layer
        work = ShardWork(
            start=start,
            state=session.state,
            position=frame.position,
            seq_len=frame.seq_len,
            payload=frame.body,
            wire_dtype=session.document.wire_dtype,
            sample=frame.sample if session.is_tail else 0,
            verify=frame.phase is Phase.VERIFY,
            cancelled=lambda: session.cancelled,
            exact=session.document.exact,
        )

        end = frame.position + frame.seq_len
        copied = self._prefixes.wants_copy(session, end)

        def finish(result: ShardResult) -> _Ran:
            tokens: tuple[SampledToken, ...] = ()
            if result.logits is not None:
                tokens = self._sampled(session, frame, result.logits)
            session.measure_state()
            return result, tokens, copy_of(session.state) if copied else None

        turn = (key, frame.epoch)

        too_late = DeadlineError(
            f"layers {session.document.hop.layers} did not finish the frame at position {frame.position} in "
            f"{RUN_DEADLINES} deadlines of a step"
        )
        with ExitStack() as leases:
            try:
                async with asyncio.timeout(max(0.0, deadline - self._clock.now())), session.entering:
                    await self._lease(leases, key, session, frame)
                    begun = replace(work, held=leases.enter_context(self._prefixes.begun_from(session, frame)))
            except TimeoutError as error:
                raise too_late from error
            on_lane = self._lane.submit(turn, shard.backend, begun, finish, hops=len(session.document.route.hops))
            # The session stays leased until the lane is through, though nobody may wait for that any more.
            on_lane.add_done_callback(partial(self._through, session, leases.pop_all()))
        try:
            if not await settled(on_lane, max(0.0, deadline - self._clock.now())):
                raise too_late
        finally:
            if not on_lane.done():  # whatever ends this wait ends the session: its frames need not run
                self._lane.withdraw(turn)
        (result, tokens, _), timing = on_lane.result()
        if frame.phase is not Phase.VERIFY:  # neither a step nor a chunk
            shard.measure(
                len(session.document.hop.layers),
                frame.seq_len,
                decode=frame.phase is Phase.DECODE,
                forward_s=timing.forward_s,
                now=self._clock.now(),
            )
        hop_timing = HopTiming(
            frame.hop_index,
            queue_ms=1000 * timing.queue_s,
            forward_ms=1000 * timing.forward_s,
            sample_ms=1000 * timing.finish_s if tokens else 0.0,
        )
        return Outcome(result.hidden, tokens, hop_timing)

    def _sampled(self, session: HopSession, frame: Frame, logits: torch.Tensor) -> tuple[SampledToken, ...]:
        """The tokens after the last positions of the frame, ``logits`` ``[frame.sample, vocab]``.

        Each is chosen as the step of its own would choose it: by the same draw, and with the tokens before it as
        history, by which alone the history grows. So a draft is right if it is that token, and after the first that is
        not there is nothing to choose: what came before its position was another text.
        """
        if len(session.history) != frame.known:
            raise CacheMissError(
                f"the tail knows {len(session.history)} token ids, the frame goes on after {frame.known}",
                reason=MissReason.POSITION_MISMATCH,
            )
        tokens: list[SampledToken] = []
        for row, draft in zip(logits, (*frame.draft, None), strict=True):
            token = self._sample_next(session, row)
            tokens.append(token)
            if token.id != draft:
                break
        return tuple(tokens)

    def _sample_next(self, session: HopSession, logits: torch.Tensor) -> SampledToken:
        """The token after all that are known; the history grows by it, so that penalties see it."""
        params, prompt_length = session.document.sampling, session.document.prompt_length
        allowed = None
        if session.constraint is not None:
            allowed = session.constraint.allowed(session.history[prompt_length:], logits.device)
        token = self._sample(logits, params, session.history, prompt_length, len(session.history), allowed)
        session.history.append(token.id)
        return token

    async def outcome_of(self, run: Run, key: SessionKey, frame: Frame, arrived: float) -> FrameReply:
        """Wait for a run without owning it: a caller that leaves, or whose time is up, does not take the run along.

        So a frame that waited long for its turn is not lost: the identical one joins it.
        """
        task = run.task
        if not await settled(task, max(0.0, arrived + frame.deadline_ms / 1000 - self._clock.now())):
            raise DeadlineError(f"the frame at position {frame.position} is not done after {frame.deadline_ms} ms")
        if task.cancelled():
            raise self._gone(key, frame.epoch)
        return task.result()

    def _gone(self, key: SessionKey, epoch: int) -> CacheMissError:
        """The miss of a frame whose session left the store while it ran."""
        try:
            self._store.require(key, epoch)
        except CacheMissError as miss:
            return miss
        return CacheMissError(f"a frame of session {key.session} was cancelled", reason=MissReason.FAILED)

    async def _lease(self, leases: ExitStack, key: SessionKey, session: HopSession, frame: Frame) -> None:
        """Lease the session for a frame, as soon as there is room for it to grow."""
        end = frame.position + frame.seq_len
        room = session.room(end) + (session.snapshot_room(end) if frame.phase is Phase.VERIFY else 0)
        while True:
            try:
                leases.enter_context(self._store.lease(key, frame.epoch, room))
            except RoomAwaitedError:
                await self._lane_left.wait()
            else:
                return

    def _through(
        self, session: HopSession, leases: ExitStack, on_lane: asyncio.Future[tuple[_Ran, LaneTiming]]
    ) -> None:
        """The lane is through with a frame; an error of it was for the run, which may have gone before."""
        error = asyncio.CancelledError() if on_lane.cancelled() else on_lane.exception()
        try:
            if error is None and (copy := on_lane.result()[0][2]) is not None:
                self._prefixes.keep_copy(session, copy)
        finally:
            leases.__exit__(None if error is None else type(error), error, None)
            self._lane_left.set()
            self._lane_left = asyncio.Event()

    def _keep(self, session: HopSession, task: asyncio.Task[Any]) -> None:
        self._background.add(task)

        def done(finished: asyncio.Task[Any]) -> None:
            self._background.discard(finished)
            session.announce()  # one less in flight
            if not finished.cancelled() and (error := finished.exception()) is not None:
                level = logging.DEBUG if isinstance(error, MeshnetError) else logging.ERROR
                logger.log(level, "a frame failed: %s", error, exc_info=error if level == logging.ERROR else None)

        task.add_done_callback(done)
