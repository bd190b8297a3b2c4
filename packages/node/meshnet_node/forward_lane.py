"""The forward lane: one thread per device that runs frames, so that the event loop only parses and replies.

Short steps of an only session may run in the loop's thread instead, see :mod:`meshnet_node.steps_here`.

Sessions take turns, as :mod:`meshnet_node.lane_schedule` has it. The unit of work is a list of frames of different
sessions; a backend says with ``batch_key`` and ``batch_limit`` which and how many it can use at once. A long frame may
run in pieces, other sessions' steps between them; its caller sees one frame.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

from meshnet_core.settle import settle
from meshnet_node.cpu_threads import take_cpu_threads
from meshnet_node.lane_schedule import LaneSchedule, Taken, is_step
from meshnet_node.shard_work import ShardBackend, ShardResult, ShardWork
from meshnet_node.steps_here import StepsHere
from meshnet_node.thread_team import ThreadTeam

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LaneTiming:
    """Seconds that a frame waited for the lane, ran, and took to be finished (sampled) after it.

    Running is the wall time of the forward that it was part of, or of its ``pieces`` together; the waits between those
    are among the first.
    """

    queue_s: float
    forward_s: float
    finish_s: float
    pieces: int = 1


# What the caller made of a frame's result, and its timing; or what was raised; None for one that was withdrawn.
LaneOutcome = tuple[T, LaneTiming] | Exception | None


@dataclass(slots=True)
class _Job(Generic[T]):
    backend: ShardBackend
    work: ShardWork
    finish: Callable[[ShardResult], T]
    loop: asyncio.AbstractEventLoop
    told: Callable[[LaneOutcome[T]], None]
    queued_at: float
    hops: int = 1
    batch: Hashable | None = field(init=False)
    is_step: bool = field(init=False)
    done: int = 0  # positions run
    pieces: int = 0  # in which they ran
    forward_s: float = 0.0
    hidden: list[memoryview] = field(default_factory=list)  # of each piece run
    withdrawn: bool = False
    leaves_team: bool = False  # the next of its turn may run in the loop's thread
    outcome: list[LaneOutcome[T]] | None = None  # where it is put for whoever runs the frame in the loop's thread

    def __post_init__(self) -> None:
        key = self.backend.batch_key(self.work) if self.backend.batch_limit > 1 else None
        self.batch = None if key is None else (id(self.backend), key)
        self.is_step = is_step(self.work.seq_len, verify=self.work.verify)

    @property
    def batch_limit(self) -> int:
        return self.backend.batch_limit

    @property
    def positions(self) -> int:
        return self.work.seq_len - self.done

    @property
    def divisible(self) -> bool:
        """Whether pieces do the same: state carries on from one to the next, and what is sampled is in the last."""
        work = self.work
        whole_rows = memoryview(work.payload).nbytes % work.seq_len == 0 if work.seq_len > 0 else False
        return work.state is not None and not work.exact and not work.verify and work.sample <= 1 and whole_rows

    def piece(self, positions: int) -> ShardWork:
        """The frame, or the next so many positions of it."""
        work = self.work
        if positions == work.seq_len:
            return work
        payload = memoryview(work.payload).cast("B")
        row = payload.nbytes // work.seq_len
        return replace(
            work,
            position=work.position + self.done,
            seq_len=positions,
            payload=payload[self.done * row : (self.done + positions) * row],
            sample=work.sample if positions == self.positions else 0,
            held=None if self.done else work.held,
        )

    def take_in(self, result: ShardResult, positions: int, seconds: float) -> ShardResult:
        """Note that a piece has run; the result of all so far."""
        self.done += positions
        self.pieces += 1
        self.forward_s += seconds
        if result.hidden is None:
            return result
        self.hidden.append(result.hidden)
        if len(self.hidden) == 1 or self.positions:
            return result
        return replace(result, hidden=memoryview(b"".join(self.hidden)))

    def settle(self, value: LaneOutcome[T]) -> None:
        """Hand the outcome to the loop that waits for it; a loop that is gone has nobody to tell."""
        if self.outcome is not None:
            self.outcome.append(value)
            return
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.told, value)


class ForwardLane:
    """Runs frames on one device, one list at a time, in a thread of its own.

    Args:
        name: of the thread.
        threads: CPU threads that torch uses for this lane's frames; None leaves it as it is. Set in the lane's own
            thread, since OpenMP keeps a team of threads for each thread that calls it: where others had teams too,
            there would be more threads than cores, and libgomp then puts waiting ones to sleep at every product.
        here: which steps run in the thread of who hands them in, the event loop's; none if not given.
        team: goes to whichever thread runs frames.
        now: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        name: str = "forward-lane",
        *,
        threads: int | None = None,
        here: StepsHere | None = None,
        team: ThreadTeam | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._now = now
        self._threads = threads
        self._schedule: LaneSchedule[_Job[object]] = LaneSchedule()
        self._running: dict[object, _Job[object]] = {}
        self._batches: Counter[int] = Counter()
        self._here = here or StepsHere(0.0)
        self._team = team or ThreadTeam()
        self._set_here = 0  # the thread besides the lane's own that has its number of threads
        self._ready = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Frames that the lane is not through with: those that wait for their turn, and those that run."""
        with self._ready:
            return len(self._running) + len(self._schedule)

    @property
    def batches(self) -> dict[int, int]:
        """How many steps ran in one forward -> how often, since the start."""
        with self._ready:
            return dict(self._batches)

    def submit(
        self, turn: object, backend: ShardBackend, work: ShardWork, finish: Callable[[ShardResult], T], *, hops: int = 1
    ) -> asyncio.Future[tuple[T, LaneTiming]]:
        """As :meth:`hand`, for one who awaits the outcome.

        The future has what ``finish`` returned, or what it or the backend raised; it is cancelled where the frame was
        withdrawn, or the lane closed before it ran. Cancelling it does not take the frame along, which then runs for
        nobody.
        """
        future: asyncio.Future[tuple[T, LaneTiming]] = asyncio.get_running_loop().create_future()
        self.hand(turn, backend, work, finish, partial(settle, future), hops=hops)
        return future

    def hand(
        self,
        turn: object,
        backend: ShardBackend,
        work: ShardWork,
        finish: Callable[[ShardResult], T],
        told: Callable[[LaneOutcome[T]], None],
        *,
        hops: int = 1,
        here: float | None = None,
    ) -> None:
        """Run ``work`` when it is ``turn``'s turn, then ``finish`` on its result, both on the lane's thread.

        Or at once in the caller's thread; then ``told`` has been called when this returns.

        Args:
            turn: whose frame this is; frames of one ``turn`` run in the order they were given.
            backend: the shard to run on.
            work: the frame.
            finish: what turns the shard's result into the caller's (sampling, say).
            told: is called once, in the running event loop, with what became of it.
            hops: of the session's route: so many batches of such sessions can be under way at once.
            here: seconds that the frame is expected to run, if it may in the caller's thread.
        """
        loop = asyncio.get_running_loop()
        now = self._now()
        job: _Job[T] = _Job(backend, work, finish, loop, told, now, hops)
        with self._ready:
            if self._closed:
                raise RuntimeError("the forward lane is closed")
            runs_here = (
                here is not None
                and self._here.allows(here, now)
                and not self._running
                and self._schedule.is_only_for(turn, now)
            )
            if not runs_here or self._team.is_elsewhere:
                job.leaves_team = runs_here
                self._team.leave()
                self._schedule.put(turn, job, now)  # type: ignore[arg-type]
                self._ready.notify()
                return
            taken = self._schedule.take_alone(turn, job, now)  # type: ignore[arg-type]
            job.outcome = []
            began, ended = self._run_here(taken)
        try:
            told(*job.outcome)
        finally:  # what is noted may come after the next hop, or who asked, was told
            loop.call_soon(self._here.went_round)
            with self._ready:
                self._note(taken, ended - began, ended)

    async def run(
        self, turn: object, backend: ShardBackend, work: ShardWork, finish: Callable[[ShardResult], T], *, hops: int = 1
    ) -> tuple[T, LaneTiming]:
        """The outcome of :meth:`submit`."""
        return await self.submit(turn, backend, work, finish, hops=hops)

    def withdraw(self, turn: object) -> None:
        """Cancel the frames of ``turn`` that wait; one that runs goes on, and whoever awaits it is told its end.

        Of one that runs in pieces, those after the one under way do not run.
        """
        with self._ready:
            jobs = self._schedule.remove(turn)
            if turn in self._running:
                self._running[turn].withdrawn = True
        for job in jobs:
            job.settle(None)

    def forget(self, turn: object) -> None:
        """``turn`` sends no frames any more: others need not leave time for them."""
        with self._ready:
            self._schedule.forget(turn)
            self._ready.notify()

    def close(self) -> None:
        """Stop after the frame that is running; frames still queued are cancelled."""
        with self._ready:
            self._closed = True
            self._ready.notify()
        self._thread.join()
        for job in self._schedule:
            job.settle(None)
        self._schedule = LaneSchedule()

    def _run_here(self, taken: Taken[_Job[object]]) -> tuple[float, float]:
        """Run a step in this thread, holding the lock, so that the lane's cannot meanwhile; when its layers ran."""
        if self._threads is not None and self._set_here != threading.get_ident():
            take_cpu_threads(self._threads)
            self._set_here = threading.get_ident()
        self._started(taken)
        results, began, ended = self._forward(taken)
        self._conclude(taken.turns[0], taken.jobs[0], results[0], taken.positions, began, ended)
        now = self._now()
        self._here.ran(now - began, now)
        return began, ended

    def _run(self) -> None:
        if self._threads is not None:
            take_cpu_threads(self._threads)
        while (taken := self._next()) is not None:
            self._execute(taken)
            if taken.jobs[0].leaves_team:
                self._leave_team()
            del taken  # the lane may have nothing to do for long, and they hold states and tensors

    def _next(self) -> Taken[_Job[object]] | None:
        """Wait for what runs next; None once the lane is closed."""
        with self._ready:
            while not self._closed:
                taken = self._schedule.take(self._now())
                if isinstance(taken, Taken):
                    self._started(taken)
                    return taken
                self._ready.wait(taken)
            return None

    def _started(self, taken: Taken[_Job[object]]) -> None:
        self._running = dict(zip(taken.turns, taken.jobs, strict=True))
        self._team.take()

    def _leave_team(self) -> None:
        """End the lane's team, so that the next step may run in another thread; unless there is more to do in this one.

        After the frame was told, so that nobody waits for it, and before the next one may come to the lane.
        """
        with self._ready:
            if not len(self._schedule):
                self._team.leave()

    def _execute(self, taken: Taken[_Job[object]]) -> None:
        results, started, ended = self._forward(taken)
        with self._ready:
            self._note(taken, ended - started, ended)
        for turn, job, result in zip(taken.turns, taken.jobs, results, strict=True):
            self._conclude(turn, job, result, taken.positions, started, ended)

    def _note(self, taken: Taken[_Job[object]], seconds: float, ended: float) -> None:
        if taken.jobs[0].is_step:
            self._batches[len(taken.jobs)] += 1
        self._schedule.ran(taken, seconds, ended)

    def _forward(self, taken: Taken[_Job[object]]) -> tuple[list[ShardResult | Exception], float, float]:
        """What came of each job, and when they began and ended."""
        jobs = taken.jobs
        started = self._now()
        try:
            works = [job.piece(taken.positions) for job in jobs]
            results: list[ShardResult | Exception] = list(jobs[0].backend.forward(works))
            if len(results) != len(jobs):
                raise RuntimeError(f"the backend gave {len(results)} results for {len(jobs)} frames")  # noqa: TRY301
        except Exception as error:  # noqa: BLE001 - the lane outlives any frame; the frame's caller gets the error
            results = [error] * len(jobs)
        return results, started, self._now()

    def _conclude(
        self,
        turn: object,
        job: _Job[object],
        result: ShardResult | Exception,
        positions: int,
        started: float,
        ended: float,
    ) -> None:
        """Tell a frame's outcome; or queue what is left of it."""
        if isinstance(result, Exception):
            self._settle(turn, job, result)
            return
        result = job.take_in(result, positions, ended - started)
        if job.positions:
            with self._ready:
                if not (job.withdrawn or self._closed):
                    self._schedule.put_back(turn, job)
                    return
            self._settle(turn, job, None)
            return
        finishing = self._now()
        try:
            value = job.finish(result)
        except Exception as error:  # noqa: BLE001 - as above
            self._settle(turn, job, error)
            return
        queue_s = max(0.0, ended - job.queued_at - job.forward_s)
        self._settle(turn, job, (value, LaneTiming(queue_s, job.forward_s, self._now() - finishing, job.pieces)))

    def _settle(self, turn: object, job: _Job[object], value: LaneOutcome[object]) -> None:
        """Tell the outcome of a frame that ran; who hears of it finds the lane through with it."""
        with self._ready:
            self._running.pop(turn, None)
        job.settle(value)
