"""How long a lane that could run some decode steps waits for more of them, to run all in one forward. Pure.

Steps that left a node together come in one after the other, some milliseconds apart; and groups fall apart, when one of
them finds the lane free and the others do not. Over two hops eight sessions are best off as two groups of four:

    hop 1   [a b c d][e f g h][a b c d][e f g h]        not   [a][b c d][e f g h][a][b c d] ...
    hop 2            [a b c d][e f g h][a b c d]

A forward costs what reading the weights costs, and a little for each step in it. Where two groups become one, the first
is saved once in each round to come; so it pays to wait for some of that time, once. Knows no sessions and no queues.
"""

from __future__ import annotations

from dataclasses import dataclass, field

APART_S, APART = 0.01, 0.1
"""What comes one after the other comes this far apart at most, in seconds and in forwards of steps."""
TOGETHER = 0.25  # forwards' time that may pass in all while they come
PATIENCE = 0.75
"""Of what is saved, that is waited for steps which make a group as large as all groups can be."""
PATIENCE_S = 1.0
"""No such wait is longer, in seconds: a forward that had its weights read from a disk first is no measure of others."""
IN_VAIN = 0.5  # share of such waits that bring nobody, from which on there are none for a while
_NEWEST = 0.2  # weight of the newest wait
_FORGETS = 0.01  # of that share, with each forward that was not waited for
_WEIGHT = 0.05  # of the newest forward in what is known of costs


@dataclass(slots=True)
class BatchCost:
    """What a forward of steps takes whatever their number, from those that ran: a line through seconds by steps."""

    _steps: float = 0.0
    _seconds: float = 0.0
    _variance: float = 0.0
    _covariance: float = 0.0

    def ran(self, steps: int, seconds: float) -> None:
        """Take in one forward."""
        if not self._steps:
            self._steps, self._seconds = float(steps), seconds
            return
        off, late = steps - self._steps, seconds - self._seconds
        self._steps += _WEIGHT * off
        self._seconds += _WEIGHT * late
        self._variance = (1 - _WEIGHT) * (self._variance + _WEIGHT * off * off)
        self._covariance = (1 - _WEIGHT) * (self._covariance + _WEIGHT * off * late)

    @property
    def fixed_s(self) -> float:
        """Seconds; all of the mean where forwards did not differ in size."""
        each = self._covariance / self._variance if self._variance > 0 else 0.0
        return min(self._seconds, max(0.0, self._seconds - max(0.0, each) * self._steps))


@dataclass(slots=True)
class StepGathering:
    """The waits of one lane. It is asked before each forward of steps.

    Attributes:
        cost: of forwards.
    """

    cost: BatchCost = field(default_factory=BatchCost)
    _came: float = 0.0  # the newest step
    _since: float | None = None  # the first of those that wait could have run
    _had: int | None = None  # steps that waited when a wait for a larger group began
    _in_vain: float = 0.0  # share of waits

    def came(self, now: float) -> None:
        """A step has come in."""
        self._came = now

    def wait_s(self, have: int, enough: int, most: int, now: float, step_s: float) -> float:
        """Seconds for which the steps that wait do not run yet; 0 runs them.

        Args:
            have: steps that wait and can run together.
            enough: as many as each group has at least, if all of the sessions about make groups of one size.
            most: that may run together.
            now: by the lane's clock, in seconds.
            step_s: that a forward of steps takes.
        """
        if have < most:
            if self._since is None:
                self._since = now
            until = min(self._came + min(APART_S, APART * step_s), self._since + TOGETHER * step_s)
            if have < enough and (self._had is not None or self._in_vain < IN_VAIN):
                self._had = have if self._had is None else self._had
                until = max(until, self._since + min(PATIENCE_S, PATIENCE * min(step_s, self.cost.fixed_s)))
            if until > now:
                return until - now
        self._since = None
        if self._had is None:
            self._in_vain *= 1 - _FORGETS
        else:
            self._in_vain += _NEWEST * ((have <= self._had) - self._in_vain)
            self._had = None
        return 0.0
