"""Which frames a forward lane runs next, and how much of a long one: so that prefills do not stall decode steps.

Sessions take turns. Decode steps that can run in one forward do, as many as wait at that moment; none is waited for.
While steps are about, a chunk of a prompt runs in pieces about as long as a batch of steps, and after each piece the
steps come first, until they have had as much of the lane; a chunk that must run whole gives them as much afterwards:

    steps       ▓▓▓      ▓▓▓      ▓▓▓      ▓▓▓             a batch of all that wait
    a prefill      ▒▒▒▒     ▒▒▒▒     ▒▒▒▒     ▒▒▒▒▒▒▒▒▒▒▒  pieces; the rest at once when the steps are over

Pure but for what it has queued: the lane brings jobs and the time. Knows no threads, backends or tensors.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

STEP_POSITIONS = 16
"""Frames of up to so many positions are steps: reading the weights is most of what they take. The least piece, too."""
FIRST_PIECE = 32
STEPS_LINGER_S = 1.0
"""Steps are about for so long after one has run: a session's next is at another hop, or at the gateway, meanwhile."""
LINGER_STEPS = 4  # or for as long as so many batches take
HOLD = 3.0
"""A prefill waits for the steps to come for at most so many times what it took: at each of two hops another piece may
run, and the steps are to have half of the time at both."""
_WEIGHT = 0.2  # of the newest batch in the mean of what one takes


class Job(Protocol):
    """What is queued.

    Attributes:
        batch: jobs of one batch can run in one forward, at most ``batch_limit`` of them; None for one that runs alone.
        batch_limit: see there.
        is_step: see :func:`is_step`.
        positions: of the frame, that have not run yet.
        divisible: whether it may run in pieces.
    """

    @property
    def batch(self) -> Hashable | None: ...
    @property
    def batch_limit(self) -> int: ...
    @property
    def is_step(self) -> bool: ...
    @property
    def positions(self) -> int: ...
    @property
    def divisible(self) -> bool: ...


J = TypeVar("J", bound=Job)


@dataclass(frozen=True, slots=True)
class Taken(Generic[J]):
    """What runs next.

    Attributes:
        turns: whose jobs these are, in the same order.
        jobs: one, or several that run in one forward.
        positions: how many of the jobs' positions run now.
    """

    turns: tuple[object, ...]
    jobs: tuple[J, ...]
    positions: int


def is_step(positions: int) -> bool:
    """Whether a frame of so many positions counts as a step."""
    return positions <= STEP_POSITIONS


@dataclass(slots=True)
class LaneSchedule(Generic[J]):
    """The queues of a lane's sessions, and what its time went to. Not safe for threads.

    Attributes:
        step_s: seconds that a batch of steps takes, a running mean; None before the first.
    """

    step_s: float | None = None
    _queues: OrderedDict[object, deque[J]] = field(default_factory=OrderedDict)
    _last_step: float | None = None
    _owed_s: float = 0.0  # to steps, for what long frames took
    _slack_s: float = 0.0  # of it, that need not be paid before the next long frame
    _hold_until: float = 0.0
    _piece: int = FIRST_PIECE

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __iter__(self) -> Iterator[J]:
        for queue in self._queues.values():
            yield from queue

    def put(self, turn: object, job: J) -> None:
        """Queue a job behind those of its turn; a turn that had none stands at the end."""
        self._queues.setdefault(turn, deque()).append(job)

    def put_back(self, turn: object, job: J) -> None:
        """Queue what is left of a job before the others of its turn."""
        self._queues.setdefault(turn, deque()).appendleft(job)

    def remove(self, turn: object) -> tuple[J, ...]:
        """Take out the jobs of a turn."""
        return tuple(self._queues.pop(turn, ()))

    def take(self, now: float) -> Taken[J] | float | None:
        """What runs next; or the seconds after which to ask again, if nothing comes before; or None: nothing waits."""
        waits = self._wait_s(now)
        chosen = next((turn for turn, queue in self._queues.items() if not waits or queue[0].is_step), None)
        if chosen is None:
            return waits if self._queues else None
        first = self._queues[chosen][0]
        turns = [chosen, *self._beside(chosen, first)]
        positions = self._piece_of(first, now)
        jobs = []
        for turn in turns:
            queue = self._queues.pop(turn)
            jobs.append(queue.popleft())
            if queue:
                self._queues[turn] = queue  # to the back: the others come first
        return Taken(tuple(turns), tuple(jobs), positions)

    def ran(self, taken: Taken[J], seconds: float, now: float) -> None:
        """Note what a job or a batch took."""
        if taken.jobs[0].is_step:
            self.step_s = seconds if self.step_s is None else self.step_s + _WEIGHT * (seconds - self.step_s)
            self._last_step = now
            self._owed_s = max(0.0, self._owed_s - seconds)
            return
        if self._steps_are_about(now - seconds) and self._last_step is not None:
            self._last_step += seconds  # they could not run meanwhile
        if self._steps_are_about(now):
            # What is left of an older debt stays, unless the steps had their chance: so the halves even out.
            left = self._owed_s if now - seconds < self._hold_until else 0.0
            self._owed_s, self._slack_s = left + seconds, min(seconds, self.step_s or 0.0) / 2
            self._hold_until = now + HOLD * seconds
        if self.step_s is not None and seconds > 0:
            # As long as a batch of steps; by half or double at a time, since a single measurement strays.
            wanted = taken.positions * min(2.0, max(0.5, self.step_s / seconds))
            self._piece = max(STEP_POSITIONS, round(wanted))

    def _beside(self, chosen: object, first: J) -> list[object]:
        """The other turns whose next job can run in one forward with ``first``."""
        if first.batch is None:
            return []
        fitting = [turn for turn, queue in self._queues.items() if turn != chosen and queue[0].batch == first.batch]
        return fitting[: first.batch_limit - 1]

    def _piece_of(self, job: J, now: float) -> int:
        if job.is_step or not job.divisible or not self._steps_are_about(now):
            return job.positions
        return min(job.positions, self._piece)

    def _wait_s(self, now: float) -> float:
        """Seconds for which long jobs leave the lane to steps."""
        if self._owed_s <= self._slack_s or not self._steps_are_about(now):
            return 0.0
        return max(0.0, self._hold_until - now)

    def _steps_are_about(self, now: float) -> bool:
        if any(queue[0].is_step for queue in self._queues.values()):
            return True
        if self._last_step is None:
            return False
        return now - self._last_step < max(STEPS_LINGER_S, LINGER_STEPS * (self.step_s or 0.0))
