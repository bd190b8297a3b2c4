"""Matrices in columns: the layout of weights that oneDNN chooses on many x86 CPUs, and kernels of ours read.

    bfloat16  [out, in]  ->  [out / 64, in / 2, 64, 2]
    float32                  [out / 64, in, 64]

What one input gives to 64 outputs, or two of 16 bits, lies together, and is read once from one end to the other. The
library promises no layout, so it is looked at, not assumed.
"""

from __future__ import annotations

import ctypes

import torch

from meshnet_node.kernel_library import COLUMN

_WORD = 4  # bytes that lie together of one output


def in_columns(matrix: torch.Tensor) -> torch.Tensor:
    """``[out, in]`` so laid out; ``out`` is a multiple of 64, ``in`` one of 2 in 16 bits."""
    return matrix.view(matrix.shape[0] // COLUMN, COLUMN, -1, _WORD // matrix.itemsize).transpose(1, 2).contiguous()


def lies_in_columns(laid: torch.Tensor, matrix: torch.Tensor) -> bool | None:
    """Whether ``laid``, of a layout that torch gives no storage for, has the very bytes of ``matrix`` in columns.

    Looks at the first and the last 64 outputs; None where they tell nothing, as zeros do.
    """
    if matrix.dtype not in {torch.bfloat16, torch.float32} or matrix.shape[0] % COLUMN:
        return False
    if matrix.shape[1] * matrix.itemsize % _WORD or not laid.is_mkldnn or laid.nbytes != matrix.nbytes:
        return False
    held = (ctypes.c_byte * laid.nbytes).from_address(torch.ops.mkldnn.data_ptr(laid))
    words = torch.frombuffer(held, dtype=torch.int32).view(matrix.shape[0] // COLUMN, -1)
    for at in (0, -1):
        rows = matrix.view(-1, COLUMN, matrix.shape[1])[at]
        columns = in_columns(rows)
        if torch.equal(columns.flatten(), rows.flatten()):
            return None
        if not torch.equal(words[at], columns.view(torch.int32).flatten()):
            return False
    return True
