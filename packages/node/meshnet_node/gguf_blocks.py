"""Blocks of 32 values as GGUF files hold them, taken apart into 4-bit codes, scales and zeros.

Three block types are of the form ``(code - 8) * scale + zero`` with one scale and one zero for 32 values and codes of
0 to 15, which is what torch's packed 4-bit product computes
(https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h has the blocks):

    Q4_0   d, 16 bytes          value = (q - 8) * d                 scale d, zero 0
    Q4_1   d, m, 16 bytes       value = q * d + m                   scale d, zero m + 8 d
    Q8_0   d, 32 signed bytes   value = q * d                       q + 128 = 16 high + low: scale d, zero 8/17 d

Byte ``i`` of the 4-bit blocks has value ``i`` in its low half and ``i + 16`` in its high half. A block of Q8_0 becomes
32 high codes and after them 32 low ones, a group of 64 with one scale and one zero, for a product with the input 16
times over and then as it is: ``16 x ((high - 8) d + zero) + x ((low - 8) d + zero) = x (q - 8) d + 17 x zero``. The sum
of both is made inside the product, in float32. Knows no files, models or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

GROUP = 32
"""Values that share a scale."""

BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
"""Block types that can be held without loss but for the rounding of scales, and bytes of a block."""

PLANES = {"Q4_0": 1, "Q4_1": 1, "Q8_0": 2}
"""4-bit codes for each value."""


HELD = {1: "int4", 2: "int8"}
"""What so many planes are called in a dtype's name."""


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Rows of a matrix as 4-bit codes.

    Attributes:
        codes: uint8 ``[rows, planes * columns]``, each 0 to 15; of two planes 32 high ones before their 32 low ones.
        scales, zeros: float32 ``[rows, columns / 32]``.
    """

    codes: Array
    scales: Array
    zeros: Array

    def values(self, planes: int) -> Array:
        """What they stand for, float32 ``[rows, columns]``."""
        rows, groups = self.scales.shape
        grouped = self.codes.reshape(rows, groups, planes, GROUP).astype(np.float32) - 8
        high, low = grouped[:, :, 0], grouped[:, :, -1]
        values = high * self.scales[..., None] + self.zeros[..., None]
        if planes == 2:
            values = (16 * high + low + 8) * self.scales[..., None]
        return np.asarray(values.reshape(rows, -1))


def coded_rows(kind: str, blocks: Array) -> CodedRows:
    """Take blocks apart.

    Args:
        kind: of :data:`BLOCK_BYTES`.
        blocks: uint8 ``[rows, bytes of a row]``, as the file has them.
    """
    rows = blocks.shape[0]
    split = blocks.reshape(rows, -1, BLOCK_BYTES[kind])
    scales = _halves(split, 0)
    if kind == "Q8_0":
        return coded_bytes(np.ascontiguousarray(split[..., 2:]).view(np.int8).reshape(rows, -1), scales)
    packed = split[..., 2:] if kind == "Q4_0" else split[..., 4:]
    codes = np.concatenate([packed & 15, packed >> 4], axis=-1).reshape(rows, -1)
    zeros = np.zeros_like(scales) if kind == "Q4_0" else _halves(split, 2) + 8 * scales
    return CodedRows(codes, scales, zeros)


def coded_bytes(values: Array, scales: Array) -> CodedRows:
    """Two planes for signed bytes.

    Args:
        values: int8 ``[rows, columns]``.
        scales: float32 ``[rows, columns / 32]``.
    """
    grouped = values.reshape(len(values), -1, 1, GROUP)
    codes = np.concatenate([(grouped >> 4) + 8, grouped & 15], axis=2).astype(np.uint8)
    return CodedRows(codes.reshape(len(values), -1), scales, scales * np.float32(8 / 17))


def _halves(blocks: Array, at: int) -> Array:
    """The float16 at byte ``at`` of every block, as float32."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)
