"""A weight matrix in torch's packed 4-bit form for CPUs: products with it, single rows of it, and how it is filled.

The product is ``aten::_weight_int4pack_mm_for_cpu`` (torch 2.5 and later): bfloat16 inputs, float32 sums, and weights
``(code - 8) * scale + zero`` in groups of 32 along a row. Weights of 8 bits are two codes each, in groups of 64 (see
:mod:`meshnet_node.gguf_blocks`). The packed layout depends on the CPU (:mod:`meshnet_node.packed_layout`).
Knows no files or models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from meshnet_node.checkpoint_reader import own_pages
from meshnet_node.gguf_blocks import GROUP, CodedRows
from meshnet_node.packed_layout import ROW_BLOCK, packed_layout
from meshnet_node.unpacking import UNPACKED_VALUES, unpacked

_FEW = 64  # inputs up to which the packed product is faster than unpacking and bfloat16's own
_FILL_CODES = 1 << 17  # at most so many codes are widened to int32 at a time, to be packed

_ops: Any = torch.ops.aten
_int4_product: Any = _ops._weight_int4pack_mm_for_cpu.default
_PLANE_WEIGHTS = torch.tensor([16, 1], dtype=torch.bfloat16).view(2, 1)


def packed_bytes(rows: int, columns: int, planes: int) -> int:
    """Bytes of a packed matrix of that shape."""
    return -(-rows // ROW_BLOCK) * ROW_BLOCK * columns * (4 * planes + 1) // 8


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A matrix ``[rows, columns]``; ``columns`` is a multiple of 32.

    Attributes:
        planes: 1 for weights of 4 bits, 2 for weights of 8.
        codes: packed, uint8 ``[padded rows, planes * columns / 2]``.
        scales: bfloat16 ``[columns / 32, padded rows, 2]``: scale and zero.
    """

    rows: int
    columns: int
    planes: int
    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def rows_at_a_time(self) -> int:
        """How many rows :meth:`fill` is best given at once."""
        return max(1, _FILL_CODES // (self.planes * self.columns * ROW_BLOCK)) * ROW_BLOCK

    @torch.inference_mode()
    def fill(self, start: int, coded: CodedRows) -> None:
        """Take in the rows from ``start`` (a multiple of 64) on: whole blocks of 64, or up to the last row."""
        count = coded.codes.shape[0]
        padded = -(-count // ROW_BLOCK) * ROW_BLOCK
        codes = torch.zeros(padded, self.planes * self.columns, dtype=torch.int32)
        codes[:count] = torch.from_numpy(coded.codes)
        self.codes[start : start + padded] = _ops._convert_weight_to_int4pack_for_cpu(codes, 1)
        self.scales[:, start : start + padded] = 0
        self.scales[:, start : start + count, 0] = torch.from_numpy(coded.scales).t()
        self.scales[:, start : start + count, 1] = torch.from_numpy(coded.zeros).t()

    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        """``inputs @ matrix.T``: bfloat16 ``[n, columns]`` -> bfloat16 ``[n, rows]``."""
        if inputs.shape[0] > _FEW:
            return self._product_unpacked(inputs)
        given = _for_planes(inputs) if self.planes == 2 else inputs.contiguous()
        out: torch.Tensor = _ops._weight_int4pack_mm_for_cpu(given, self.codes, self.planes * GROUP, self.scales)
        return out if out.shape[1] == self.rows else out[:, : self.rows]

    def _product_unpacked(self, inputs: torch.Tensor) -> torch.Tensor:
        """For many inputs, where the packed product would unpack each weight again and again."""
        step = max(1, UNPACKED_VALUES // (self.columns * ROW_BLOCK)) * ROW_BLOCK
        if step >= self.rows:
            return (inputs @ self._unpacked(0, self.codes.shape[0]))[:, : self.rows]
        out = torch.empty(inputs.shape[0], self.rows, dtype=inputs.dtype)
        for start in range(0, self.rows, step):
            stop = min(start + step, self.codes.shape[0])
            out[:, start:stop] = (inputs @ self._unpacked(start, stop))[:, : self.rows - start]
        return out

    def _unpacked(self, start: int, stop: int) -> torch.Tensor:
        """The rows of whole blocks as bfloat16 ``[columns, stop - start]``, until the next are unpacked here."""
        packed = self.codes[start:stop].view(-1, self.columns // GROUP, self.planes, GROUP, packed_layout().rows // 2)
        return unpacked(packed, self.scales[:, start:stop], packed_layout())

    def take(self, indices: torch.Tensor) -> torch.Tensor:
        """Single rows: int64 ``[n]`` -> bfloat16 ``[n, columns]``, rounded once from float32."""
        layout = packed_layout()
        half, width = layout.rows // 2, self.planes * self.columns
        within = indices % layout.rows
        packed = self.codes.view(-1, width, half)[indices // layout.rows, :, layout.byte[within]]
        codes = (packed >> layout.shift[within].unsqueeze(1)) & 15
        grouped = codes.view(len(indices), -1, self.planes, GROUP).float()
        kept = self.scales[:, indices].float().transpose(0, 1).unsqueeze(-1)  # [n, groups, 2, 1]
        scale, zero = kept[:, :, 0], kept[:, :, 1]
        if self.planes == 2:
            values = (grouped[:, :, 0] * 16 + grouped[:, :, 1] - 128) * scale
        else:
            values = (grouped[:, :, 0] - 8) * scale + zero
        return values.view(len(indices), self.columns).to(torch.bfloat16)


def _for_planes(inputs: torch.Tensor) -> torch.Tensor:
    """``[n, columns]`` -> ``[n, 2 * columns]``: each group 16 times over for its high codes, then as it is."""
    return (inputs.reshape(len(inputs), -1, 1, GROUP) * _PLANE_WEIGHTS).reshape(len(inputs), -1)


class PackedMatrix(nn.Module):
    """One such matrix as a module. Empty until :meth:`fill` has had all its rows.

    Attributes:
        is_whole: whether a product of a few rows is torch's alone: one plane, and no rows that only fill a block.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(self, rows: int, columns: int, planes: int) -> None:
        super().__init__()
        self.rows, self.columns, self.planes = rows, columns, planes
        self.is_whole = planes == 1 and rows % ROW_BLOCK == 0
        _allocate(self, (), rows, columns, planes)

    @property
    def held(self) -> Packed:
        """Its tensors, as they are now."""
        return Packed(self.rows, self.columns, self.planes, self.codes, self.scales)

    @property
    def rows_at_a_time(self) -> int:
        """See :class:`Packed`."""
        return self.held.rows_at_a_time

    def fill(self, start: int, coded: CodedRows) -> None:
        """See :class:`Packed`."""
        self.held.fill(start, coded)

    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        """See :class:`Packed`."""
        if self.is_whole and inputs.shape[0] <= _FEW:  # a step's, without what it takes to look at it once more
            return _int4_product(inputs.contiguous(), self.codes, GROUP, self.scales)  # type: ignore[no-any-return]
        return self.held.product(inputs)

    def product_of_few(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """:meth:`product` for up to some tens of dense rows, without looking at anything; for one that `is_whole`.

        Holds the tensors, whatever becomes of the module.
        """
        codes, scales, product = self.codes, self.scales, torch._weight_int4pack_mm_for_cpu  # the shortest way to it
        return lambda inputs: product(inputs, codes, GROUP, scales)

    def take(self, indices: torch.Tensor) -> torch.Tensor:
        """See :class:`Packed`."""
        return self.held.take(indices)

    @classmethod
    def joined(cls, parts: Sequence[PackedMatrix]) -> PackedMatrix:
        """One matrix with the rows of all, in order: for products of one input with several weights at once.

        Raises:
            ValueError: their columns or planes differ, or one but the last has rows that fill no whole blocks of 64.
        """
        first = parts[0]
        if any((part.columns, part.planes) != (first.columns, first.planes) for part in parts):
            raise ValueError("matrices of different columns or widths cannot be joined")
        if any(part.rows % ROW_BLOCK for part in parts[:-1]):
            raise ValueError(f"matrices are joined at multiples of {ROW_BLOCK} rows")
        whole = cls(sum(part.rows for part in parts), first.columns, first.planes)
        with torch.no_grad():  # into pages of their own, as all packed weights are
            torch.cat([part.codes for part in parts], out=whole.codes)
            torch.cat([part.scales for part in parts], dim=1, out=whole.scales)
        return whole


class PackedStack(nn.Module):
    """Several matrices of one shape, as the experts of a layer have them.

    Attributes:
        codes, scales: of all, along a first dimension.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(self, count: int, rows: int, columns: int, planes: int) -> None:
        super().__init__()
        self.count, self.rows, self.columns, self.planes = count, rows, columns, planes
        _allocate(self, (count,), rows, columns, planes)

    def __getitem__(self, index: int) -> Packed:
        return Packed(self.rows, self.columns, self.planes, self.codes[index], self.scales[index])


def _allocate(module: nn.Module, count: tuple[int, ...], rows: int, columns: int, planes: int) -> None:
    padded, width = -(-rows // ROW_BLOCK) * ROW_BLOCK, planes * columns
    # Pages of their own: between the short-lived buffers of loading they would tear the heap into holes.
    codes = own_pages(prod(count) * padded * width // 2).view(*count, padded, width // 2)
    scales = own_pages(prod(count) * padded * columns // GROUP * 4).view(torch.bfloat16)
    scales = scales.view(*count, columns // GROUP, padded, 2)
    module.register_buffer("codes", codes, persistent=False)
    module.register_buffer("scales", scales, persistent=False)
