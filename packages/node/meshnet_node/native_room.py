"""What a native step writes to between its products, kept from step to step; addresses are told once."""

from __future__ import annotations

from typing import NamedTuple

import torch

from meshnet_node.kernel_library import MOST_HEADS


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

    __slots__ = ("_scores", "attended", "attended_at", "gated", "gated_at", "normed", "normed_at", "rows", "shape")

    def __init__(self, rows: int, shape: RoomShape) -> None:
        self.rows, self.shape = rows, shape
        self.normed, self.attended, self.gated = (torch.empty(rows, width, dtype=torch.bfloat16) for width in shape)
        self.normed_at, self.attended_at = self.normed.data_ptr(), self.attended.data_ptr()
        self.gated_at = self.gated.data_ptr()
        self._scores = torch.empty(0)

    def scores_at(self, positions: int) -> int:
        """Address of what attention to so many positions takes for its scores."""
        if self._scores.numel() < MOST_HEADS * positions:
            self._scores = torch.empty(2 * MOST_HEADS * positions)
        return self._scores.data_ptr()
