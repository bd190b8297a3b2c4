"""Where torch's packed 4-bit form for CPUs puts a matrix' rows, found out by packing numbers that tell where each went.

    AVX-512: 64 rows make a block, with 32 bytes for each column; byte i has row i (low half) and row i + 32 (high half)

Knows no scales and no products.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

ROW_BLOCK = 64
"""Rows are packed in blocks of so many; matrices whose rows fill them can be joined."""

_ops: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where the packed form puts the rows of a block of ``rows``, at each column in ``rows / 2`` bytes.

    Attributes:
        byte, shift: of each row: the byte, and by how many bits it is shifted there.
        low, high: of each byte: the rows in its low and its high half.
        is_halved: whether those are simply the first and the second half of the rows.
    """

    rows: int
    byte: torch.Tensor
    shift: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    is_halved: bool


@cache
def packed_layout() -> PackedLayout:
    """The layout of this process' CPU, from where the digits of row numbers went.

    Raises:
        RuntimeError: it is none that is known here; torch has changed.
    """
    columns = 2
    numbers = torch.arange(ROW_BLOCK).unsqueeze(1).expand(-1, columns)
    ones, sixteens = (
        _ops._convert_weight_to_int4pack_for_cpu(digit.to(torch.int32).contiguous(), 1).flatten().long()
        for digit in (numbers % 16, numbers // 16)
    )
    low, high = (ones & 15) + 16 * (sixteens & 15), (ones >> 4) + 16 * (sixteens >> 4)
    # With two columns a block's first half of bytes is the first column, the second half the second.
    size = next((s for s in (64, 32, 16) if torch.equal(low[: s // 2], low[s // 2 : s])), 0)
    if not size or sorted([*low[: size // 2].tolist(), *high[: size // 2].tolist()]) != list(range(size)):
        raise RuntimeError("torch packs 4-bit weights in a way that is not known here")
    low, high = low[: size // 2], high[: size // 2]
    byte, shift = torch.empty(size, dtype=torch.int64), torch.empty(size, dtype=torch.uint8)
    places = torch.arange(size // 2)
    byte[low], byte[high] = places, places
    shift[low], shift[high] = 0, 4
    is_halved = torch.equal(low, places) and torch.equal(high, places + size // 2)
    return PackedLayout(size, byte, shift, low, high, is_halved)
