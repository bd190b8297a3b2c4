"""Which frames a forward lane runs next, and how much of a long one: so that prefills do not stall decode steps.

Sessions take turns. Decode steps that can run in one forward do, but no more than leave some to each hop of their
route, which work at the same time; those that left a hop together come in one after the other, and are gathered for
some milliseconds. While steps are about, a chunk of a prompt runs in pieces as long as a few batches of steps, and
after each piece the steps come first, until they have had as much of the lane; a chunk that must run whole gives them
as much afterwards:

    steps       ▓▓▓      ▓▓▓      ▓▓▓      ▓▓▓             a batch of all that wait
    a prefill      ▒▒▒▒     ▒▒▒▒     ▒▒▒▒     ▒▒▒▒▒▒▒▒▒▒▒  pieces; the rest at once when the steps are over

Pure but for what it has queued: the lane brings jobs and the time. Knows no threads, backends or tensors.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from math import ceil
from typing import Generic, Protocol, TypeVar

from meshnet_node.step_gathering import StepGathering

STEP_POSITIONS = 16
"""Frames of up to so many positions are steps: reading the weights is most of what they take. The least piece, too."""
VERIFY_POSITIONS = 32
"""Frames with drafts are steps up to here: the newest token, drafts behind it, and what is sent again before it."""
FIRST_PIECE = 32
STEPS_LINGER_S = 1.0
"""Steps are about for so long after one has run: a session's next is at another hop, or at the gateway, meanwhile."""
LINGER_STEPS = 4  # or for as long as so many batches take
HOLD = 3.0
"""A prefill waits for the steps to come for at most so many times what it took: at each of two hops another piece may
run, and the steps are to have half of the time at both."""
PIECE = 2.5  # batches of steps that a piece takes
_WEIGHT = 0.2  # of the newest batch in the mean of what one takes


class Job(Protocol):
    """What is queued.

    Attributes:
        batch: jobs of one batch can run in one forward, at most ``batch_limit`` of them; None for one that runs alone.
        batch_limit: see there.
        is_step: see :func:`is_step`.
        positions: of the frame, that have not run yet.
        divisible: whether it may run in pieces.
        hops: of the session's route.
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
    @property
    def hops(self) -> int: ...


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


def is_step(positions: int, *, verify: bool = False) -> bool:
    """Whether a frame of so many positions, some of them drafts if ``verify``, counts as a step."""
    return positions <= (VERIFY_POSITIONS if verify else STEP_POSITIONS)


@dataclass(slots=True)
class LaneSchedule(Generic[J]):
    """The queues of a lane's sessions, and what its time went to. Not safe for threads.

    Attributes:
        step_s: seconds that a batch of steps takes, a running mean; None before the first.
    """

    step_s: float | None = None
    _queues: OrderedDict[object, deque[J]] = field(default_factory=OrderedDict)
    _gathering: StepGathering = field(default_factory=StepGathering)
    _stepped: OrderedDict[object, tuple[float, Hashable | None]] = field(default_factory=OrderedDict)  # see `_about`
    _stepping: set[object] = field(default_factory=set)  # turns whose steps run, but those forgotten meanwhile
    _owed_s: float = 0.0  # to steps, for what long frames took
    _slack_s: float = 0.0  # of it, that need not be paid before the next long frame
    _hold_until: float = 0.0
    _piece: int = FIRST_PIECE

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __iter__(self) -> Iterator[J]:
        for queue in self._queues.values():
            yield from queue

    def put(self, turn: object, job: J, now: float) -> None:
        """Queue a job behind those of its turn; a turn that had none stands at the end."""
        if job.is_step:
            self._gathering.came(now)
            self._note_step(turn, now, job.batch)
        self._queues.setdefault(turn, deque()).append(job)

    def put_back(self, turn: object, job: J) -> None:
        """Queue what is left of a job before the others of its turn."""
        self._queues.setdefault(turn, deque()).appendleft(job)

    def remove(self, turn: object) -> tuple[J, ...]:
        """Take out the jobs of a turn."""
        return tuple(self._queues.pop(turn, ()))

    def forget(self, turn: object) -> None:
        """Its session is over: the lane need not wait for its next step."""
        self._stepped.pop(turn, None)
        self._stepping.discard(turn)

    def is_only_for(self, turn: object, now: float) -> bool:
        """Whether nothing waits, and a step of this turn has run a moment ago, and of no other."""
        return not self._queues and self._about(now).keys() == {turn}

    def take_alone(self, turn: object, job: J, now: float) -> Taken[J]:
        """What `put` and :meth:`take` come to for a step where `is_only_for` holds, in less time."""
        self._gathering.came(now)
        self._note_step(turn, now, job.batch)
        self._stepping = {turn}
        return Taken((turn,), (job,), job.positions)

    def take(self, now: float) -> Taken[J] | float | None:
        """What runs next; or the seconds after which to ask again, if nothing comes before; or None: nothing waits."""
        waits = self._wait_s(now)
        chosen = next((turn for turn, queue in self._queues.items() if not waits or queue[0].is_step), None)
        if chosen is None:
            return waits if self._queues else None
        first = self._queues[chosen][0]
        turns = [chosen, *self._beside(chosen, first, now)]
        if (gathers := self._gather_s(first, len(turns), now, held=waits > 0)) > 0:
            return gathers
        positions = self._piece_of(first, now)
        jobs = []
        for turn in turns:
            queue = self._queues.pop(turn)
            jobs.append(queue.popleft())
            if queue:
                self._queues[turn] = queue  # to the back: the others come first
        self._stepping = set(turns) if first.is_step else set()
        return Taken(tuple(turns), tuple(jobs), positions)

    def ran(self, taken: Taken[J], seconds: float, now: float) -> None:
        """Note what a job or a batch took."""
        if taken.jobs[0].is_step:
            self._gathering.cost.ran(len(taken.jobs), seconds)
            self.step_s = seconds if self.step_s is None else self.step_s + _WEIGHT * (seconds - self.step_s)
            for turn in taken.turns:
                if turn in self._stepping:
                    self._note_step(turn, now, taken.jobs[0].batch)
            self._stepping = set()
            self._about(now)  # forgets those that have gone, whoever asks for them or not
            self._owed_s = max(0.0, self._owed_s - seconds)
            return
        if about := self._about(now - seconds).items():  # they could not run meanwhile
            self._stepped = OrderedDict((turn, (min(now, last + seconds), batch)) for turn, (last, batch) in about)
        if self._steps_are_about(now):
            # What is left of an older debt stays, unless the steps had their chance: so the halves even out.
            left = self._owed_s if now - seconds < self._hold_until else 0.0
            self._owed_s, self._slack_s = (
                left + seconds * self._share_of_steps(now),
                min(seconds, self.step_s or 0.0) / 2,
            )
            self._hold_until = now + HOLD * seconds
        if self.step_s is not None and seconds > 0:
            # As long as a batch of steps; by half or double at a time, since a single measurement strays.
            wanted = taken.positions * min(2.0, max(0.5, PIECE * self.step_s / seconds))
            self._piece = max(STEP_POSITIONS, round(wanted))

    def _beside(self, chosen: object, first: J, now: float) -> list[object]:
        """The other turns whose next job can run in one forward with ``first``."""
        if first.batch is None:
            return []
        fitting = [turn for turn, queue in self._queues.items() if turn != chosen and queue[0].batch == first.batch]
        return fitting[: self._most(first, now) - 1]

    def _most(self, first: J, now: float) -> int:
        """Steps in one forward: the sessions about, spread over their hops, so that each of those has some to run."""
        return min(first.batch_limit, max(1, ceil(self._alike(first, now) / first.hops)))

    def _alike(self, first: J, now: float) -> int:
        """Sessions about whose steps can run in one forward with ``first``."""
        alike = {turn for turn, (_, batch) in self._about(now).items() if batch == first.batch}
        return len(alike | {turn for turn, queue in self._queues.items() if queue[0].batch == first.batch})

    def _gather_s(self, first: J, together: int, now: float, *, held: bool) -> float:
        """Seconds for which steps that wait leave the lane idle, since more are to come in; long frames may be held."""
        if first.batch is None:
            return 0.0
        most = self._most(first, now)
        # What each group has if all are alike; but whatever else could run meanwhile waits for no such group.
        nobody_waits = all(
            queue[0].batch == first.batch if queue[0].is_step else held for queue in self._queues.values()
        )
        enough = min(most, self._alike(first, now) // first.hops) if nobody_waits else 0
        return self._gathering.wait_s(together, enough, most, now, self.step_s or 0.0)

    def _note_step(self, turn: object, now: float, batch: Hashable | None) -> None:
        self._stepped[turn] = (now, batch)
        self._stepped.move_to_end(turn)  # in order of time

    def _about(self, now: float) -> OrderedDict[object, tuple[float, Hashable | None]]:
        """Whose steps are about: of each turn that ran, or waits, the moment and the batch."""
        lingers = self._linger_s()
        while self._stepped and now - next(iter(self._stepped.values()))[0] >= lingers:
            self._stepped.popitem(last=False)
        return self._stepped

    def _share_of_steps(self, now: float) -> float:
        """Of the lane, by that of prefills: as much, but no more than a session each."""
        prefills = 1 + sum(not queue[0].is_step for queue in self._queues.values())
        return min(1.0, len(self._about(now)) / prefills)

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
        return bool(self._about(now))

    def _linger_s(self) -> float:
        return max(STEPS_LINGER_S, LINGER_STEPS * (self.step_s or 0.0))
