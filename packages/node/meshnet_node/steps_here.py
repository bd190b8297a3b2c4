"""Which decode steps run in the event loop's own thread, which spares them two hand-overs between threads. Pure.

While one runs, the node answers nothing: a probe, a release, a heartbeat wait for it. So steps have to be short for
that, and the loop goes round once between two of them. After one that was long there are none for a while: whatever
made it so, weights read from a disk or other work on the machine, may last.
"""

from __future__ import annotations

from dataclasses import dataclass

HERE_S = 0.025  # that others may have to wait
PAUSE_S = 10.0


@dataclass(slots=True)
class StepsHere:
    """The steps of one lane.

    Attributes:
        limit_s: seconds, sampling included, that a step has to take less than; 0 for no steps at all.
    """

    limit_s: float
    _not_before: float = 0.0
    _owes_a_round: bool = False

    def allows(self, expected_s: float, now: float) -> bool:
        """Whether a step that is expected to take ``expected_s`` may run in the loop's thread."""
        return not self._owes_a_round and expected_s < self.limit_s and now >= self._not_before

    def ran(self, seconds: float, now: float) -> None:
        """Note what one took."""
        self._owes_a_round = True
        if seconds >= self.limit_s:
            self._not_before = now + PAUSE_S

    def went_round(self) -> None:
        """The loop has served what else was there."""
        self._owes_a_round = False
