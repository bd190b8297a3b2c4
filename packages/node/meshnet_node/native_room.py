"""What a native step writes to between its products, kept from step to step; addresses are told once."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RoomShape(NamedTuple):
    """Widths of a layer's rows: hidden states, heads together, and the gated part of its MLP (0: it has none)."""

    hidden: int
    attended: int
    gated: int


class NativeRoom:
    """For steps of so many rows.

    Attributes:
        normed, attended, gated: bfloat16 ``[rows, ...]`` of the shape's widths; ``..._at`` are their addresses.
    """

    __slots__ = ("_blocks", "attended", "attended_at", "gated", "gated_at", "normed", "normed_at", "rows", "shape")

    def __init__(self, rows: int, shape: RoomShape) -> None:
        self.rows, self.shape = rows, shape
        self.normed, self.attended, self.gated = (torch.empty(rows, width, dtype=torch.bfloat16) for width in shape)
        self.normed_at, self.attended_at = self.normed.data_ptr(), self.attended.data_ptr()
        self.gated_at = self.gated.data_ptr()
        self._blocks = torch.empty(0, dtype=torch.float32)

    def blocks_at(self, values: int) -> int:
        """Address of so many float32, for what attention finds in blocks of positions."""
        if self._blocks.numel() < values:
            self._blocks = torch.empty(2 * values, dtype=torch.float32)  # whatever the process' default is
        return self._blocks.data_ptr()
