"""A forward lane whose backends are scripted, and the tasks that wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from meshnet_node.forward_lane import ForwardLane
from meshnet_node.shard_work import ShardBackend, ShardResult, ShardWork


class ScriptedBackend:
    """Notes the batches it is given; each waits for the gate. A payload that names an error is answered with it."""

    def __init__(self, batch_limit: int = 1) -> None:
        self.batch_limit = batch_limit
        self.batches: list[list[str]] = []
        self.threads: set[str] = set()
        self.gate = threading.Semaphore(0)
        self.started = threading.Semaphore(0)
        self.answer: Callable[[list[str]], list[ShardResult | Exception]] = lambda names: [result() for _ in names]

    def forward(self, works: Sequence[ShardWork]) -> list[ShardResult | Exception]:
        names = [bytes(work.payload).decode() for work in works]
        self.batches.append(names)
        self.threads.add(threading.current_thread().name)
        self.started.release()
        assert self.gate.acquire(timeout=20)
        return self.answer(names)

    def batch_key(self, work: ShardWork) -> object:
        return None if work.exact else "any"

    def let(self, batches: int = 1) -> None:
        """Let some batches through."""
        self.gate.release(batches)

    def run_free(self) -> None:
        self.let(10_000)

    @property
    def order(self) -> list[str]:
        return [name for batch in self.batches for name in batch]


def result() -> ShardResult:
    return ShardResult(hidden=None, logits=None, seconds=0.0)


def work(name: str) -> ShardWork:
    return ShardWork(start=0, state=None, position=0, seq_len=1, payload=name.encode(), wire_dtype="float32")


class Lane:
    """A lane with the tasks that wait for it."""

    def __init__(self, **options: Any) -> None:
        self.lane = ForwardLane("lane-under-test", **options)
        self.backend = ScriptedBackend()
        self.tasks: list[asyncio.Task[Any]] = []

    def submit(
        self,
        turn: object,
        name: str,
        backend: ScriptedBackend | None = None,
        finish: Callable[[ShardResult], object] | None = None,
        exact: bool = False,
    ) -> asyncio.Task[Any]:
        run_on = cast(ShardBackend, backend or self.backend)
        frame = replace(work(name), exact=exact)
        task = asyncio.create_task(self.lane.run(turn, run_on, frame, finish or (lambda _: name)))
        self.tasks.append(task)
        return task

    async def occupy(self) -> asyncio.Task[Any]:
        """A frame that runs and waits for the gate, so that what is submitted next is queued behind it."""
        task = self.submit("first", "first")
        await asyncio.to_thread(self.backend.started.acquire)
        return task

    async def queue(self, *frames: tuple[object, str]) -> None:
        """Submit (turn, name) pairs, in order."""
        for turn, name in frames:
            self.submit(turn, name)
            await asyncio.sleep(0)

    async def finish(self) -> list[Any]:
        self.backend.run_free()
        return await asyncio.wait_for(asyncio.gather(*self.tasks, return_exceptions=True), 20)


async def closed_after(lane: Lane) -> AsyncIterator[Lane]:
    """The lane, which is closed when it is not needed any more."""
    yield lane
    lane.backend.run_free()
    await asyncio.to_thread(lane.lane.close)
    await asyncio.gather(*lane.tasks, return_exceptions=True)
