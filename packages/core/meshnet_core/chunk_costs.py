"""What a chunk of a prefill costs a shard, as its node measured it. A plain, frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshnet_core.errors import InvalidInputError
from meshnet_core.link_info import MAX_MS
from meshnet_core.wire_fields import optional_number


@dataclass(frozen=True, slots=True)
class ChunkCosts:
    """Milliseconds of each layer.

    Attributes:
        fixed_ms: for any chunk.
        position_ms: and for each position of it.
        depth_ms: and for each position of it and position before that, since it attends to those.
    """

    fixed_ms: float
    position_ms: float
    depth_ms: float

    def chunk_ms(self, positions: int, before: int) -> float:
        """Milliseconds of each layer for a chunk of ``positions`` positions, ``before`` positions into the text."""
        return self.fixed_ms + positions * (self.position_ms + self.depth_ms * (before + positions / 2))

    def to_wire(self) -> dict[str, float]:
        return {"fixed_ms": self.fixed_ms, "position_ms": self.position_ms, "depth_ms": self.depth_ms}

    @classmethod
    def from_wire(cls, document: object) -> ChunkCosts:
        """Read :meth:`to_wire`'s form; unknown fields of a newer peer are passed over.

        Raises:
            InvalidInputError: on a missing, ill-typed or absurd field.
        """
        if not isinstance(document, dict):
            raise InvalidInputError(f"what chunks cost is a JSON object, not {type(document).__name__}")
        return cls(_cost(document, "fixed_ms"), _cost(document, "position_ms"), _cost(document, "depth_ms"))

    @classmethod
    def optional_from_wire(cls, document: object) -> ChunkCosts | None:
        """The same; None for null, as older nodes tell nothing."""
        return None if document is None else cls.from_wire(document)


def _cost(document: dict[str, Any], key: str) -> float:
    cost = optional_number(document, key, most=MAX_MS)
    if cost is None:
        raise InvalidInputError(f"what chunks cost needs {key}, in milliseconds")
    return cost
