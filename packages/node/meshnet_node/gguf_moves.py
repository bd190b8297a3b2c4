"""How whole blocks of a GGUF tensor are moved where a conversion only moves values.

llama.cpp orders the rows of some weights otherwise than transformers (q and k of llama, for its rotary kernels; heads
of Qwen3.5's linear attention, also along columns). Blocks lie along rows, so they can be moved without being taken
apart.
Knows no files; imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshnet_node.gguf_blocks import BLOCK_BYTES, GROUP

if TYPE_CHECKING:
    from collections.abc import Callable

    Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Where each row and each column of blocks comes from; None for where it was."""

    kind: str
    rows: Array | None = None
    columns: Array | None = None

    @property
    def is_still(self) -> bool:
        return self.rows is None and self.columns is None

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of so many values."""
        return columns // GROUP * BLOCK_BYTES[self.kind]

    def moved(self, blocks: Array) -> Array:
        """Blocks uint8 ``[rows, bytes of a row]`` of a whole tensor, in their new places."""
        split = blocks.reshape(len(blocks), -1, BLOCK_BYTES[self.kind])
        split = split if self.rows is None else split[self.rows]
        split = split if self.columns is None else split[:, self.columns]
        return np.ascontiguousarray(split).reshape(blocks.shape)


def found_moves(kind: str, shape: tuple[int, ...], convert: Callable[[Array], Array]) -> BlockMoves | None:
    """What ``convert`` does to values ``shape`` (two dimensions), found out by numbers that tell where each went.

    Returns:
        None where it does more than move whole rows and whole blocks of columns.
    """
    if len(shape) != 2 or max(shape) > 1 << 24:  # float32 tells larger numbers apart no longer
        return None
    down, across = np.arange(shape[0], dtype=np.float32), np.arange(shape[1], dtype=np.float32)
    rows = convert(np.ascontiguousarray(np.broadcast_to(down[:, None], shape)))
    columns = convert(np.ascontiguousarray(np.broadcast_to(across[None], shape)))
    if rows.shape != shape or not (rows == rows[:, :1]).all() or not (columns == columns[:1]).all():
        return None
    from_rows, from_columns = rows[:, 0].astype(np.int64), columns[0].astype(np.int64)
    starts = from_columns[::GROUP]
    whole = starts[:, None] + np.arange(GROUP)
    moved = [sorted(rows[:, 0]) == down.tolist(), sorted(columns[0]) == across.tolist()]
    if not all(moved) or (starts % GROUP).any() or not np.array_equal(whole.reshape(-1), from_columns):
        return None
    still = np.array_equal(from_rows, down), np.array_equal(from_columns, across)
    return BlockMoves(kind, None if still[0] else from_rows, None if still[1] else starts // GROUP)
