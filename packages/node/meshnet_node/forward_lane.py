"""The forward lane: one thread per device that runs frames, so that the event loop only parses and replies.

Sessions take turns: each has a queue of its own and the lane goes round them, so that a long prefill's chunks and other
sessions' decode steps interleave. The unit of work is a list of frames of different sessions; a backend says how many
it can use at once with ``batch_limit``.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from meshnet_node.model_backend import ShardBackend, ShardResult, ShardWork

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LaneTiming:
    """Seconds that a frame waited for the lane, ran, and took to be finished (sampled) after it."""

    queue_s: float
    forward_s: float
    finish_s: float


@dataclass(slots=True)
class _Job(Generic[T]):
    backend: ShardBackend
    work: ShardWork
    finish: Callable[[ShardResult], T]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[tuple[T, LaneTiming]]
    queued_at: float = field(default_factory=time.perf_counter)

    def settle(self, value: tuple[T, LaneTiming] | Exception | None) -> None:
        """Hand the outcome to the loop that waits for it, None for a cancel; a loop that is gone has nobody to tell."""

        def hand_over() -> None:
            if self.future.done():
                return
            if value is None:
                self.future.cancel()
            elif isinstance(value, Exception):
                self.future.set_exception(value)
            else:
                self.future.set_result(value)

        try:
            self.loop.call_soon_threadsafe(hand_over)
        except RuntimeError:
            return


class ForwardLane:
    """Runs frames on one device, one list at a time, in a thread of its own.

    Args:
        name: of the thread.
        threads: CPU threads that torch uses for this lane's frames; None leaves it as it is. Set in the lane's own
            thread, since OpenMP keeps a team of threads for each thread that calls it: where others had teams too,
            there would be more threads than cores, and libgomp then puts waiting ones to sleep at every product.
    """

    def __init__(self, name: str = "forward-lane", *, threads: int | None = None) -> None:
        self._threads = threads
        self._queues: OrderedDict[object, deque[_Job[object]]] = OrderedDict()
        self._running = 0
        self._ready = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Frames that the lane is not through with: those that wait for their turn, and those that run."""
        with self._ready:
            return self._running + sum(len(queue) for queue in self._queues.values())

    async def run(
        self, turn: object, backend: ShardBackend, work: ShardWork, finish: Callable[[ShardResult], T]
    ) -> tuple[T, LaneTiming]:
        """Run ``work`` when it is ``turn``'s turn, then ``finish`` on its result, both on the lane's thread.

        Args:
            turn: whose frame this is; frames of one ``turn`` run in the order they were given.
            backend: the shard to run on.
            work: the frame.
            finish: what turns the shard's result into the caller's (sampling, say).

        A caller that is cancelled does not take its frame along: it runs when its turn comes, unless it is withdrawn.

        Raises:
            whatever the backend or ``finish`` raised.
            asyncio.CancelledError: the frame was withdrawn, or the lane closed before it ran.
        """
        loop = asyncio.get_running_loop()
        job: _Job[T] = _Job(backend, work, finish, loop, loop.create_future())
        with self._ready:
            if self._closed:
                raise RuntimeError("the forward lane is closed")
            self._queues.setdefault(turn, deque()).append(job)  # type: ignore[arg-type]
            self._ready.notify()
        return await job.future

    def withdraw(self, turn: object) -> None:
        """Cancel the frames of ``turn`` that wait; one that runs goes on, and whoever awaits it is told its end."""
        with self._ready:
            jobs = self._queues.pop(turn, ())
        for job in jobs:
            job.settle(None)

    def close(self) -> None:
        """Stop after the frame that is running; frames still queued are cancelled."""
        with self._ready:
            self._closed = True
            self._ready.notify()
        self._thread.join()
        for queue in self._queues.values():
            for job in queue:
                job.settle(None)
        self._queues.clear()

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        while True:
            with self._ready:
                while not self._queues and not self._closed:
                    self._ready.wait()
                if self._closed:
                    return
                jobs = self._take()
                self._running = len(jobs)
            self._execute(jobs)
            del jobs  # the lane may have nothing to do for long, and they hold states and tensors

    def _take(self) -> list[_Job[object]]:
        """The next session's first frame, and those of others that the same backend can run beside it."""
        jobs: list[_Job[object]] = []
        for turn in list(self._queues):
            queue = self._queues[turn]
            if jobs and (queue[0].backend is not jobs[0].backend or len(jobs) >= jobs[0].backend.batch_limit):
                continue
            jobs.append(queue.popleft())
            del self._queues[turn]
            if queue:
                self._queues[turn] = queue  # to the back: the others come first
        return jobs

    def _settle(self, job: _Job[object], value: tuple[object, LaneTiming] | Exception) -> None:
        """Tell the outcome of a frame that ran; who hears of it finds the lane through with it."""
        with self._ready:
            self._running -= 1
        job.settle(value)

    def _execute(self, jobs: list[_Job[object]]) -> None:
        started = time.perf_counter()
        try:
            results: list[ShardResult | Exception] = list(jobs[0].backend.forward([job.work for job in jobs]))
            if len(results) != len(jobs):
                raise RuntimeError(f"the backend gave {len(results)} results for {len(jobs)} frames")  # noqa: TRY301
        except Exception as error:  # noqa: BLE001 - the lane outlives any frame; the frame's caller gets the error
            results = [error] * len(jobs)
        forward_s = time.perf_counter() - started
        for job, result in zip(jobs, results, strict=True):
            if isinstance(result, Exception):
                self._settle(job, result)
                continue
            finishing = time.perf_counter()
            try:
                value = job.finish(result)
            except Exception as error:  # noqa: BLE001 - as above
                self._settle(job, error)
                continue
            timing = LaneTiming(started - job.queued_at, forward_s, time.perf_counter() - finishing)
            self._settle(job, (value, timing))
