"""A contiguous range of layers. Knows nothing of models, nodes or tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshnet_core.errors import InvalidInputError

_SHOWN = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")


@dataclass(frozen=True, order=True, slots=True)
class LayerRange:
    """Half-open range of layer indices ``[start, stop)``; never empty.

    People see and type it inclusive: ``0-20`` is ``LayerRange(0, 21)``.

    Raises:
        InvalidInputError: if ``start`` is negative or the range is empty.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.stop <= self.start:
            raise InvalidInputError(
                f"layer range [{self.start}, {self.stop}) is empty or negative; start must be >= 0 and below stop"
            )

    @classmethod
    def parse(cls, text: str) -> LayerRange:
        """Read the form people type: ``"0-20"`` (inclusive) or ``"7"`` (one layer)."""
        match = _SHOWN.fullmatch(text.strip())
        if match is None:
            raise InvalidInputError(f"layers {text!r} are not a range; write FIRST-LAST, both included, such as 0-20")
        first = int(match[1])
        last = int(match[2]) if match[2] is not None else first
        if last < first:
            raise InvalidInputError(
                f"layers {text!r} run backwards; write the lower layer first, such as {last}-{first}"
            )
        return cls(first, last + 1)

    @classmethod
    def parse_all(cls, text: str) -> tuple[LayerRange, ...]:
        """Read several with commas between them, ``"0-14,15-29"``; they may overlap."""
        return tuple(cls.parse(part) for part in text.split(","))

    def __str__(self) -> str:
        """The inclusive form, as :meth:`parse` reads it."""
        return f"{self.start}-{self.stop - 1}"

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, layer: int) -> bool:
        return self.start <= layer < self.stop

    def covers(self, other: LayerRange) -> bool:
        """Whether every layer of ``other`` lies in this range."""
        return self.start <= other.start and other.stop <= self.stop

    def starting_at(self, start: int) -> LayerRange:
        """The part from an effective ``start`` to this range's end.

        Raises:
            InvalidInputError: if ``start`` lies outside this range.
        """
        if start not in self:
            raise InvalidInputError(f"effective start {start} lies outside layers {self}")
        return LayerRange(start, self.stop)
