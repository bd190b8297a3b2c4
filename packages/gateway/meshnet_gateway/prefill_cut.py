"""How a prefill is cut into chunks, and how many of those are under way at once: a plain, frozen value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise, repeat

from meshnet_core.frames import MAX_CHUNK

LEAST_IN_FLIGHT = 2  # one runs on the first hop, the other waits for it there
MOST_IN_FLIGHT = 4  # as many frames of one session as a hop queues


@dataclass(frozen=True, slots=True)
class PrefillCut:
    """How a prefill goes.

    Attributes:
        lengths: positions in each chunk, in order, at least one of at least 1; whatever is behind them goes in chunks
            as long as the longest.
        in_flight: chunks under way at once.
    """

    lengths: tuple[int, ...] = (MAX_CHUNK,)
    in_flight: int = LEAST_IN_FLIGHT

    @property
    def longest(self) -> int:
        """Positions in the longest chunk."""
        return max(self.lengths)

    def chunks(self, begin: int, stop: int, cuts: Iterable[int] = ()) -> Iterator[tuple[int, int]]:
        """First position of each chunk from ``begin`` to ``stop``, and the one after its last.

        begin 0, stop 700, lengths 256, 256, 256     0-255    256-511             512-699
        and a cut at 300                             0-255    256-299   300-511   512-699

        Args:
            begin, stop: positions; none are left between them if ``stop`` is not behind ``begin``.
            cuts: positions at which a chunk must end. What is left of it then goes by itself, so that those behind it
                stay as they were planned.
        """
        ends = {*self._ends(begin, stop), *(cut for cut in cuts if begin < cut < stop)}
        return pairwise(sorted({begin, *ends}))

    def _ends(self, begin: int, stop: int) -> Iterator[int]:
        end = begin
        for length in chain(self.lengths, repeat(self.longest)):
            if end >= stop:
                return
            end = min(end + length, stop)
            yield end
