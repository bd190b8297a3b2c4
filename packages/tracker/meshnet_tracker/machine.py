"""A machine as placement sees it: how much it may hold and how fast it is. Pure; knows no node and no network."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import ceil, floor, inf
from typing import TYPE_CHECKING

from meshnet_core.errors import InvalidInputError

if TYPE_CHECKING:
    from meshnet_core.layer_range import LayerRange
    from meshnet_core.model_facts import ModelFacts

_ROUNDING = 1 + 1e-9  # sums of floats that should be equal are not, quite


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine.

    Attributes:
        name: its node id.
        memory: bytes that weights and the room kept for sessions may take; of a fixed one it is not looked at.
        width: bytes of an element at its dtype, see ``ModelFacts.width``.
        layer_ms: milliseconds for one layer and one decoded position.
        hop_ms: milliseconds that one more hop costs.
        held: what it holds or is about to hold; None for a newcomer.
        fixed: whether ``held`` is a person's choice, which placement leaves as it is.

    Raises:
        InvalidInputError: sizes or times that cannot be, or a fixed machine that holds nothing.
    """

    name: str
    memory: int
    width: float
    layer_ms: float
    hop_ms: float = 0.0
    held: LayerRange | None = None
    fixed: bool = False

    def __post_init__(self) -> None:
        if self.memory < 0 or self.width <= 0 or not 0 < self.layer_ms < inf or not 0 <= self.hop_ms < inf:
            raise InvalidInputError(f"machine {self.name}: memory and times are positive numbers")
        if self.fixed and self.held is None:
            raise InvalidInputError(f"machine {self.name} is fixed, but to no layers")

    def time(self, facts: ModelFacts, start: int, stop: int) -> float:
        """Milliseconds of its part of a decode step, if that is ``[start, stop)``."""
        head = facts.head_layers if stop == facts.num_layers else 0.0
        return self.hop_ms + self.layer_ms * (stop - start + head)

    def bytes(self, facts: ModelFacts, start: int, stop: int) -> int:
        """Bytes that ``[start, stop)`` takes here, with the room kept for sessions."""
        return ceil(self.width * facts.elements(start, stop))

    def fits(self, facts: ModelFacts, start: int, stop: int) -> bool:
        return self.bytes(facts, start, stop) <= self.memory

    def furthest(self, facts: ModelFacts, start: int, limit_ms: float) -> int:
        """The last boundary to which it can run from ``start`` within its memory and a time; ``start`` if to none.

        Never further from a lower start than from a higher one.
        """
        if self._runs_to_the_end(facts, start, limit_ms):
            return facts.num_layers
        by_time = facts.num_layers
        if limit_ms < inf:
            by_time = start + max(0, floor((limit_ms * _ROUNDING - self.hop_ms) / self.layer_ms))
        elements = int(self.memory // self.width) - (facts.embedding if start == 0 else 0)
        by_memory = bisect_right(facts.sums, facts.sums[start] + elements) - 1
        stop = min(by_time, by_memory, facts.num_layers - 1)
        if stop <= start:
            return start
        if facts.cuts is not None:
            boundaries = facts.boundaries
            stop = boundaries[bisect_right(boundaries, stop) - 1]
        return max(start, stop)

    def _runs_to_the_end(self, facts: ModelFacts, start: int, limit_ms: float) -> bool:
        total = facts.num_layers
        return self.fits(facts, start, total) and self.time(facts, start, total) <= limit_ms * _ROUNDING
