"""A hop's own part of a frame: the session leased, its layers run on the lane, tokens chosen at the tail.

Knows no order of frames and no other hop; those are `frame_runs`', `prompt_runs`' and `frame_delivery`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch

from meshnet_core.clock import Clock
from meshnet_core.errors import CacheMissError, MissReason
from meshnet_core.frames import Frame, HopTiming, Phase
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_node.cache_store import CacheStore, RoomAwaitedError, SessionKey
from meshnet_node.forward_lane import ForwardLane, LaneOutcome, LaneTiming
from meshnet_node.hop_session import HopSession, Outcome
from meshnet_node.prefix_use import PrefixUse, copy_of
from meshnet_node.session_state import SessionState
from meshnet_node.shard_work import ShardResult, ShardWork


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


@dataclass(frozen=True, slots=True)
class Ran:
    """What the lane made of a frame; with a copy of the state to hold on, if one is wanted."""

    result: ShardResult
    tokens: tuple[SampledToken, ...]
    copy: SessionState | None


class OwnLayers:
    """Runs frames of the sessions in ``store`` on this node's layers.

    Args:
        store: leases the sessions.
        prefixes: what sessions begin from, and leave to others.
        lane: runs the frames.
        sample: chooses tokens at the tail.
        clock: what measured speeds are dated by.
    """

    def __init__(
        self,
        store: CacheStore[HopSession],
        prefixes: PrefixUse,
        lane: ForwardLane,
        sample: SampleFunction,
        clock: Clock,
    ) -> None:
        self._store = store
        self._prefixes = prefixes
        self._lane = lane
        self._sample = sample
        self._clock = clock
        self._left: asyncio.Event | None = None  # for who waits until a frame has left the lane, and its lease ended

    def lease(self, leases: ExitStack, key: SessionKey, session: HopSession, frame: Frame) -> None:
        """Lease the session for a frame, with room to grow by it.

        Raises:
            RoomAwaitedError: others have to give way first; see :meth:`room`.
            CacheMissError, CacheFullError: there is no room, as `CacheStore.lease` says.
        """
        end = frame.position + frame.seq_len
        room = 0
        if frame.phase is Phase.VERIFY:
            room = session.room(end) + session.snapshot_room(end)
        elif end > session.reserved:
            room = session.room(end)
        leases.enter_context(self._store.lease(key, frame.epoch, room))

    async def leased(self, leases: ExitStack, key: SessionKey, session: HopSession, frame: Frame) -> None:
        """:meth:`lease`, as soon as there is room."""
        while True:
            try:
                self.lease(leases, key, session, frame)
            except RoomAwaitedError:
                self._left = self._left or asyncio.Event()
                await self._left.wait()
            else:
                return

    def hand(
        self,
        leases: ExitStack,
        key: SessionKey,
        session: HopSession,
        frame: Frame,
        told: Callable[[LaneOutcome[Ran]], None],
        *,
        here: bool = False,
    ) -> None:
        """Hand a frame to the lane. The session stays leased until the lane is through, whoever waits for that.

        Args:
            leases: on the session; they end once ``told`` has been called, or where this raises.
            key, session, frame: what to run.
            told: see `ForwardLane.hand`.
            here: whether it may run in this thread, and ``told`` be called before this returns.

        Raises:
            CacheMissError: the prefix that the frame begins from is gone.
        """
        shard = session.shard
        copied = self._prefixes.wants_copy(session, frame.position + frame.seq_len)

        def finish(result: ShardResult) -> Ran:
            tokens = () if result.logits is None else self._sampled(session, frame, result.logits)
            session.measure_state()
            return Ran(result, tokens, copy_of(session.state) if copied else None)

        resumes = frame.phase is Phase.RESUME
        with leases:
            work = ShardWork(
                start=frame.start_layer,
                state=session.state,
                position=frame.position,
                seq_len=frame.seq_len,
                payload=frame.body,
                wire_dtype=session.document.wire_dtype,
                sample=frame.sample if session.is_tail else 0,
                verify=frame.phase is Phase.VERIFY,
                cancelled=lambda: session.cancelled,
                held=leases.enter_context(self._prefixes.begun_from(session, frame)) if resumes else None,
                exact=session.document.exact,
            )
            held = leases.pop_all()
        hops = len(session.document.route.hops)
        expected_s = self._expected_s(session, frame) if here and not copied else None
        try:
            self._lane.hand(
                (key, frame.epoch), shard.backend, work, finish, lambda ran: self._ended(session, held, told, ran),
                hops=hops, here=expected_s,
            )  # fmt: skip
        except BaseException:
            held.close()
            raise

    @staticmethod
    def _expected_s(session: HopSession, frame: Frame) -> float | None:
        """Seconds that a decode step will take; None where that is not known."""
        layer_ms = session.shard.decode_ms.value
        if frame.phase is not Phase.DECODE or layer_ms is None:
            return None
        return layer_ms * len(session.document.hop.layers) / 1000

    def withdraw(self, key: SessionKey, epoch: int) -> None:
        """See `ForwardLane.withdraw`."""
        self._lane.withdraw((key, epoch))

    def measure(self, session: HopSession, frame: Frame, timing: LaneTiming) -> None:
        """Take in how long a frame took."""
        if frame.phase is Phase.VERIFY:  # neither a step nor a chunk
            return
        # Pieces cost as many chunks as there are of them, and logits what no other chunk costs.
        is_plain = timing.pieces == 1 and not (frame.sample and session.is_tail)
        session.shard.measure(
            len(session.document.hop.layers),
            frame.seq_len,
            decode=frame.phase is Phase.DECODE,
            forward_s=timing.forward_s,
            now=self._clock.now(),
            before=frame.position if is_plain else None,
        )

    @staticmethod
    def outcome(frame: Frame, ran: Ran, timing: LaneTiming) -> Outcome:
        """What this hop made of a frame."""
        hop_timing = HopTiming(
            frame.hop_index,
            queue_ms=1000 * timing.queue_s,
            forward_ms=1000 * timing.forward_s,
            sample_ms=1000 * timing.finish_s if ran.tokens else 0.0,
        )
        return Outcome(ran.result.hidden, ran.tokens, hop_timing)

    def _ended(
        self, session: HopSession, leases: ExitStack, told: Callable[[LaneOutcome[Ran]], None], ran: LaneOutcome[Ran]
    ) -> None:
        """The lane is through with a frame; an error of it is for its leases too: what was not run on saved nothing."""
        error: BaseException | None = asyncio.CancelledError() if ran is None else None
        if isinstance(ran, Exception):
            error = ran
        try:
            told(ran)
            if isinstance(ran, tuple) and (copy := ran[0].copy) is not None:
                self._prefixes.keep_copy(session, copy)
        finally:
            leases.__exit__(*((None, None, None) if error is None else (type(error), error, error.__traceback__)))
            if self._left is not None:  # others are waiting for the room
                self._left.set()
                self._left = None

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
