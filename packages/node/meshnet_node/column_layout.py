"""Matrices in columns: the layout of bfloat16 weights that oneDNN chooses on many x86 CPUs, and kernels of ours read.

    [out, in]  ->  [out / 64, in / 2, 64, 2]

What two inputs give to 64 outputs lies together, and is read once from one end to the other. The library promises no
layout, so it is looked at, not assumed.
"""

from __future__ import annotations

import ctypes

import torch

from meshnet_node.kernel_library import COLUMN


def in_columns(matrix: torch.Tensor) -> torch.Tensor:
    """``[out, in]`` so laid out; ``out`` is a multiple of 64, ``in`` an even number."""
    return matrix.view(matrix.shape[0] // COLUMN, COLUMN, -1, 2).transpose(1, 2).contiguous()


def lies_in_columns(laid: torch.Tensor, matrix: torch.Tensor) -> bool:
    """Whether ``laid``, of a layout that torch gives no storage for, has the very bytes of ``matrix`` in columns."""
    if matrix.dtype is not torch.bfloat16 or matrix.shape[0] % COLUMN or matrix.shape[1] % 2:
        return False
    if not laid.is_mkldnn or laid.nbytes != matrix.nbytes:
        return False
    held = (ctypes.c_byte * laid.nbytes).from_address(torch.ops.mkldnn.data_ptr(laid))
    return torch.equal(torch.frombuffer(held, dtype=torch.int16), in_columns(matrix).view(torch.int16).flatten())
