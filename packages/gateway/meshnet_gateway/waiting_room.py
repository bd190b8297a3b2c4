"""Where generations wait until the nodes have room for them: one line for each model, oldest generation first.

    nobody waits          the open is tried at once
    no room               into the line, by the generation's arrival: one that was preempted goes ahead of newer ones
    the oldest in line    tries again when a generation of this gateway has ended, and every so often, since sessions of
                          other gateways end too; the polls are drawn, so that two gateways do not stay in step
    all others            wait until they are the oldest; nobody overtakes
    too many, too long    `NoRoomError`

Bounded: where a line is full, the youngest is turned away. Knows no nodes and no sessions; what a try does is given.
"""

from __future__ import annotations

import asyncio
import bisect
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from meshnet_core.clock import Clock
from meshnet_core.errors import CacheFullError

T = TypeVar("T")

MAX_WAITING = 256  # generations in one line
MAX_WAIT_S = 120.0
POLL_S = (0.2, 1.0)  # between two tries of the oldest, if nothing is heard meanwhile


class NoRoomError(CacheFullError):
    """The waiting had no end: the line was full, or the time was up. The code on the wire is its parent's."""


@dataclass(slots=True, eq=False)  # one object is one who waits
class _Waiter:
    """One in line; ``due`` says that a try may find another outcome than the last."""

    arrival: int
    since: float
    due: bool
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    turned_away: bool = False
    refusal: CacheFullError | None = None  # of the last try


@dataclass(slots=True)
class _Line:
    """Those who wait for one model, oldest first."""

    waiters: list[_Waiter] = field(default_factory=list)
    trying: bool = False

    def wake_oldest(self) -> None:
        if self.waiters:
            self.waiters[0].due = True
            self.waiters[0].woken.set()


class WaitingRoom:
    """The lines of one gateway. Not thread-safe: one event loop owns it.

    Args:
        clock: for the limit of the waiting.
        max_waiting: generations in one model's line.
        max_wait_s: how long one waits, in seconds.
        sleep: waits, in seconds.
        draw: a number in [0, 1), for the polls.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        max_waiting: int = MAX_WAITING,
        max_wait_s: float = MAX_WAIT_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.max_waiting = max_waiting
        self.max_wait_s = max_wait_s
        self.waits = 0  # how often somebody had to wait
        self.turned_away = 0  # how often somebody was told that there is no room
        self.waited_s = 0.0  # by all together
        self._clock = clock
        self._sleep = sleep
        self._draw = draw
        self._lines: dict[str, _Line] = {}

    @property
    def waiting(self) -> int:
        """How many wait now, for whatever model."""
        return sum(len(line.waiters) for line in self._lines.values())

    def freed(self) -> None:
        """A generation has ended: there may be room, for any model, since a node's budget is for all of them."""
        for line in self._lines.values():
            line.wake_oldest()

    async def admit(self, model: str, arrival: int, attempt: Callable[[], Awaitable[T]]) -> T:
        """The outcome of the first try that finds room, in the generation's turn.

        Args:
            model: whose line it is.
            arrival: the generation's place among all; a lower one came earlier.
            attempt: one try; raises `CacheFullError` where there is no room.

        Raises:
            NoRoomError: the line is full, or it took too long.
            CacheFullError: one that says that there would never be room.
            Exception: whatever else a try raises; it ends the waiting.
        """
        waiter = _Waiter(arrival, self._clock.now(), due=True)
        if model not in self._lines:
            try:
                return await attempt()
            except CacheFullError as refusal:
                if refusal.never:
                    raise
                waiter.refusal, waiter.due = refusal, False
        self._join(model, waiter)
        try:
            return await self._wait(model, waiter, attempt)
        finally:
            self._leave(model, waiter)

    async def _wait(self, model: str, waiter: _Waiter, attempt: Callable[[], Awaitable[T]]) -> T:
        line = self._lines[model]
        while True:
            self._check(waiter)
            oldest = line.waiters[0] is waiter
            if oldest and waiter.due and not line.trying:
                line.trying, waiter.due = True, False
                try:
                    return await attempt()
                except CacheFullError as refusal:
                    if refusal.never:
                        raise
                    waiter.refusal = refusal
                finally:
                    line.trying = False
                    if line.waiters[0] is not waiter:  # somebody older came meanwhile
                        line.wake_oldest()
                continue
            patience = max(0.0, waiter.since + self.max_wait_s - self._clock.now())
            if oldest and not line.trying:
                shortest, longest = POLL_S
                patience = min(patience, shortest + (longest - shortest) * self._draw())
            if not await self._woken(waiter, patience) and oldest:
                waiter.due = True

    async def _woken(self, waiter: _Waiter, patience_s: float) -> bool:
        """Whether somebody woke it, within ``patience_s`` seconds."""
        if not waiter.woken.is_set():
            bell = asyncio.ensure_future(waiter.woken.wait())
            timer = asyncio.ensure_future(self._sleep(patience_s))
            try:
                await asyncio.wait((bell, timer), return_when=asyncio.FIRST_COMPLETED)
            finally:
                bell.cancel()
                timer.cancel()
        woken = waiter.woken.is_set()
        waiter.woken.clear()
        return woken

    def _check(self, waiter: _Waiter) -> None:
        """Whether it may go on waiting."""
        waited_s = self._clock.now() - waiter.since
        if waiter.turned_away:
            self._turn_away(waiter, f"{self.max_waiting} generations are waiting for room already, which is the limit")
        if waited_s >= self.max_wait_s:
            self._turn_away(waiter, f"no room was found in {waited_s:.0f} s")

    def _turn_away(self, waiter: _Waiter, why: str) -> None:
        self.turned_away += 1
        last = waiter.refusal
        raise NoRoomError(
            f"the mesh is busy: {why}; try again later" + (f" ({last.message})" if last is not None else ""),
            hop_index=None if last is None else last.hop_index,
            boot=None if last is None else last.boot,
        ) from last

    def _join(self, model: str, waiter: _Waiter) -> None:
        """Into the line, at the place that its arrival gives it."""
        waiters = self._lines.setdefault(model, _Line()).waiters
        bisect.insort(waiters, waiter, key=lambda other: other.arrival)
        self.waits += 1
        staying = [other for other in waiters if not other.turned_away]
        if len(staying) > self.max_waiting:
            staying[-1].turned_away = True
            staying[-1].woken.set()

    def _leave(self, model: str, waiter: _Waiter) -> None:
        """Out of the line, whatever the reason; the next one's turn has come."""
        line = self._lines[model]
        line.waiters.remove(waiter)
        self.waited_s += self._clock.now() - waiter.since
        line.wake_oldest()
        if not line.waiters:
            del self._lines[model]
