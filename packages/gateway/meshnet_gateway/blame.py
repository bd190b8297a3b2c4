"""Which nodes were blamed lately, across generations: a hung one should cost one answer its deadline, not each.

Bounded and forgetful; a memory, not a verdict. Knows no routes and no sessions.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from meshnet_core.clock import Clock

BACKOFF_S = 5.0
MAX_BACKOFF_S = 300.0
REMEMBERED_S = 600.0  # after which a node begins anew
MAX_NODES = 1024


@dataclass(frozen=True, slots=True)
class _Blame:
    times: int
    at: float
    backoff_s: float


class BlameMemory:
    """Nodes to leave out for a while, longer each time that they are blamed again.

    Args:
        clock: tells when a backoff is over.
        backoff_s: for the first time; it doubles up to ``max_backoff_s``.
    """

    def __init__(self, clock: Clock, *, backoff_s: float = BACKOFF_S, max_backoff_s: float = MAX_BACKOFF_S) -> None:
        self._clock = clock
        self._backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._blames: OrderedDict[str, _Blame] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._blames)

    def blame(self, node_id: str) -> None:
        """The node failed a generation; whoever comes next leaves it out for its backoff."""
        now = self._clock.now()
        self._forget(now)
        before = self._blames.pop(node_id, None)
        times = 1 if before is None else before.times + 1
        backoff_s = min(self._max_backoff_s, self._backoff_s * 2.0 ** min(times - 1, 32))
        self._blames[node_id] = _Blame(times, now, backoff_s)
        if len(self._blames) > MAX_NODES:
            self._blames.popitem(last=False)

    def forgive(self, node_id: str) -> None:
        """The node has served a generation to its end."""
        self._blames.pop(node_id, None)

    def excluded(self) -> frozenset[str]:
        """The nodes whose backoff is not over."""
        now = self._clock.now()
        self._forget(now)
        return frozenset(node_id for node_id, blame in self._blames.items() if now < blame.at + blame.backoff_s)

    def _forget(self, now: float) -> None:
        while self._blames and now >= next(iter(self._blames.values())).at + REMEMBERED_S:
            self._blames.popitem(last=False)
