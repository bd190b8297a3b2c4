"""The runs of frames that find their hop ready, as decode steps do: the same as `frame_runs`', but without a task.

Such a frame is the next one, no other of its session is in flight, and there is room for it. Then nothing has to be
waited for before the lane, and each thing that happens to the frame calls the next one. A task for each would cost a
small model's step more than its layers on some machines.

    begin ── lane ── ran ── delivery ── delivered: the reply is told
      └ timer: the caller's deadline, then the run's own ┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from meshnet_core.clock import Clock
from meshnet_core.errors import CacheMissError, DeadlineError, MeshnetError, MissReason
from meshnet_core.frames import Frame, FrameReply, Phase
from meshnet_core.settle import settle
from meshnet_core.transport import FrameAnswered
from meshnet_node.cache_store import CacheStore, RoomAwaitedError, SessionKey
from meshnet_node.forward_lane import LaneOutcome
from meshnet_node.frame_delivery import FrameDelivery
from meshnet_node.hop_session import FrameKey, HopSession, Run
from meshnet_node.layer_view import ForwardCancelledError
from meshnet_node.own_layers import OwnLayers, Ran

RUN_DEADLINES = 2  # a frame may run for this many of its steps' deadlines: one that was busy is asked for once more


class PromptRuns:
    """Runs frames of the sessions in ``store``.

    Args:
        store: where the sessions are.
        own: runs frames on the own layers.
        delivery: hands on what came of it.
        clock: for deadlines.
        keep: is given the reply to come of each run, and holds on to it.
        ended: is told of each once it is there; it lets go of it, and says where it failed.
    """

    def __init__(
        self,
        *,
        store: CacheStore[HopSession],
        own: OwnLayers,
        delivery: FrameDelivery,
        clock: Clock,
        keep: Callable[[asyncio.Future[FrameReply]], None],
        ended: Callable[[HopSession, asyncio.Future[FrameReply]], None],
    ) -> None:
        self.store = store
        self.own = own
        self.delivery = delivery
        self.clock = clock
        self.keep = keep
        self.ended = ended

    def begin(
        self, key: SessionKey, session: HopSession, frame: Frame, arrived: float, answered: FrameAnswered
    ) -> bool:
        """Run a frame that was checked, if it has to wait for nothing; whether that was so.

        ``answered`` is told the reply, or the error where that is wrong or not there by the frame's deadline.
        """
        if frame.phase not in {Phase.DECODE, Phase.VERIFY} or not frame.sample or not frame.cache:
            return False
        if session.entering.locked() or not session.is_next(frame) or session.in_flight:
            return False
        leases = ExitStack()
        refused: Exception | None = None
        try:
            self.own.lease(leases, key, session, frame)
        except RoomAwaitedError:
            return False
        except MeshnetError as error:
            refused = error
        run = _PromptRun(self, key, session, frame, arrived, answered)
        if refused is None:
            refused = run.enter(leases)
        run.take_in()  # while the lane's thread wakes up, unless the frame has run already, in this one
        if refused is not None:
            run.fail(refused)
        run.note()
        return True


class _PromptRun:
    """One frame, from the moment that it is taken in until its reply is told."""

    __slots__ = (
        "_answered", "_arrived", "_at", "_ends_delivery", "_frame", "_is_taken_in", "_key", "_on_lane", "_reply",
        "_run", "_session", "_timer",
    )  # fmt: skip

    def __init__(
        self,
        at: PromptRuns,
        key: SessionKey,
        session: HopSession,
        frame: Frame,
        arrived: float,
        answered: FrameAnswered,
    ) -> None:
        self._at = at
        self._key = key
        self._session = session
        self._frame = frame
        self._arrived = arrived
        self._answered: FrameAnswered | None = answered  # None once it was told
        self._on_lane = False
        self._ends_delivery: Callable[[], object] | None = None
        self._is_taken_in = False
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, leases: ExitStack) -> Exception | None:
        """Hand it to the lane; what stands against that."""
        try:
            self._on_lane = True
            self._at.own.hand(leases, self._key, self._session, self._frame, self._ran, here=True)
        except Exception as error:  # noqa: BLE001 - it is the answer
            self._on_lane = False
            return error
        return None

    def take_in(self) -> None:
        """Have the session take it, unless it has. In the same turn as :meth:`enter`, before anything is told."""
        if self._is_taken_in:
            return
        self._is_taken_in = True
        frame, session = self._frame, self._session
        self._reply: asyncio.Future[FrameReply] = asyncio.get_running_loop().create_future()
        self._run = Run(frame, len(frame.body), self._reply)
        session.take(frame, self._run)

    def note(self) -> None:
        """What has to be done about it before the loop goes on, and may come after an answer."""
        self._run.frame = replace(self._frame, body=b"")
        self._session.remember(FrameKey.of(self._frame), self._run)
        if self._reply.done():
            self._at.ended(self._session, self._reply)
            return
        self._at.keep(self._reply)
        self._session.announce()
        self._reply.add_done_callback(self._ended)
        left_s = max(0.0, self._deadline - self._at.clock.now())
        self._timer = asyncio.get_running_loop().call_later(left_s, self._caller_gives_up)

    def fail(self, error: Exception) -> None:
        """What goes wrong before a frame has run costs the session's state: some layers may have advanced."""
        self._on_lane = False
        if isinstance(error, ForwardCancelledError):
            error = gone(self._at.store, self._key, self._frame.epoch)
        self._tell(error)  # before the session goes, and cancels what has no reply
        self._at.store.drop_held(self._key, self._session, MissReason.FAILED)

    @property
    def _deadline(self) -> float:
        return self._arrived + self._frame.deadline_ms / 1000

    def _ran(self, ran: LaneOutcome[Ran]) -> None:
        """The lane is through with it: deliver what came of it, then take in how long it took."""
        self.take_in()  # where it ran within :meth:`enter`
        if not self._on_lane or self._reply.done():
            return  # it was given up; or the session has ended, and `_ended` is about to say so
        self._on_lane = False
        if isinstance(ran, Exception):
            self.fail(ran)
            return
        if ran is None:  # withdrawn: the session counts positions that its state has not
            self._reply.cancel()
            self._at.store.drop_held(self._key, self._session, MissReason.FAILED)
            return
        run, session = self._run, self._session
        try:
            outcome = self._at.own.outcome(self._frame, *ran)
            run.undelivered = None if outcome.hidden is None else outcome
            deadline = max(self._deadline, run.deadline)
            ends = self._at.delivery.deliver_soon(session, run, outcome, self._arrived, deadline, self._tell)
        except Exception as error:  # noqa: BLE001 - it is the answer
            self._tell(error)
        else:
            self._ends_delivery = None if self._reply.done() else ends
        self._at.own.measure(session, self._frame, ran[1])

    def _tell(self, outcome: FrameReply | Exception) -> None:
        """The end: who waits hears of it first, then the run has its reply, for a retry of the frame."""
        if self._reply.done():
            return
        self._ends_delivery = None
        try:
            self._tell_caller(outcome)
        finally:
            if self._timer is None or self._reply.done():  # who was told may have ended the session, and this with it
                settle(self._reply, outcome)
            else:  # what `_ended` would do in the loop's next turn
                self._reply.remove_done_callback(self._ended)
                settle(self._reply, outcome)
                self._timer.cancel()
                self._at.ended(self._session, self._reply)

    def _tell_caller(self, outcome: FrameReply | Exception) -> None:
        if self._answered is not None:
            answered, self._answered = self._answered, None
            answered(outcome)

    def _caller_gives_up(self) -> None:
        """It runs on: the identical frame may come again, and joins it."""
        self._tell_caller(not_done(self._frame))
        limit = max(self._deadline, run_limit(self._session, self._arrived))
        left_s = max(0.0, limit - self._at.clock.now())
        self._timer = asyncio.get_running_loop().call_later(left_s, self._too_late)

    def _too_late(self) -> None:
        if self._on_lane:
            self._at.own.withdraw(self._key, self._frame.epoch)
            self.fail(too_late(self._session, self._frame))

    def _ended(self, reply: asyncio.Future[FrameReply]) -> None:
        assert self._timer is not None  # noqa: S101 - for the type checker
        self._timer.cancel()
        self._at.ended(self._session, reply)
        if not reply.cancelled():
            return
        if self._on_lane:  # the session has left the store, or the node stops
            self._on_lane = False
            self._at.own.withdraw(self._key, self._frame.epoch)
            self._at.store.drop_held(self._key, self._session, MissReason.FAILED)
        if self._ends_delivery is not None:
            self._ends_delivery()
        self._tell_caller(gone(self._at.store, self._key, self._frame.epoch))


def run_limit(session: HopSession, arrived: float) -> float:
    """Until when a frame that came at ``arrived`` may be on the own layers."""
    return arrived + RUN_DEADLINES * session.document.step_deadline_ms / 1000


def not_done(frame: Frame) -> DeadlineError:
    """What the caller of a frame is told whose time is up."""
    return DeadlineError(f"the frame at position {frame.position} is not done after {frame.deadline_ms} ms")


def too_late(session: HopSession, frame: Frame) -> DeadlineError:
    """What becomes of a frame that has had its time."""
    return DeadlineError(
        f"layers {session.document.hop.layers} did not finish the frame at position {frame.position} in "
        f"{RUN_DEADLINES} deadlines of a step"
    )


def gone(store: CacheStore[HopSession], key: SessionKey, epoch: int) -> CacheMissError:
    """The miss of a frame whose session left the store while it ran."""
    try:
        store.require(key, epoch)
    except CacheMissError as miss:
        return miss
    return CacheMissError(f"a frame of session {key.session} was cancelled", reason=MissReason.FAILED)
