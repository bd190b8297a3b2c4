"""Token embeddings for a native step: a row or a few, of packed weights without the operations that unpacking takes.

Knows no layers and no sessions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from meshnet_node.gguf_blocks import GROUP
from meshnet_node.kernel_library import StepKernels
from meshnet_node.packed_layout import packed_layout
from meshnet_node.packed_matrix import PackedMatrix
from meshnet_node.quantised_layers import QuantisedEmbedding

Embedding = Callable[[torch.Tensor], torch.Tensor]
"""int64 ``[rows, 1]`` -> ``[rows, 1, hidden]``."""


def native_embedding(module: nn.Module, kernels: StepKernels) -> Embedding:
    """The shortest way to what ``module`` gives. Holds its weights, whatever becomes of the module."""
    if not isinstance(module, QuantisedEmbedding):
        return module
    return _Packed(module.matrix, kernels).rows


class _Packed:
    def __init__(self, matrix: PackedMatrix, kernels: StepKernels) -> None:
        layout = packed_layout()
        self._codes, self._scales, self._take = matrix.codes, matrix.scales, kernels.take
        self._codes_at, self._scales_at = matrix.codes.data_ptr(), matrix.scales.data_ptr()
        self._rows, self._columns, self._planes = matrix.rows, matrix.columns, matrix.planes
        self._block, self._half = layout.rows, layout.rows // 2
        self._byte, self._shift = layout.byte.tolist(), layout.shift.tolist()
        self._stride = matrix.scales.stride(0)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """See :data:`Embedding`; raises IndexError as torch's does."""
        chosen = indices.flatten().tolist()
        if not all(0 <= index < self._rows for index in chosen):
            raise IndexError(f"token ids {chosen} are not all below {self._rows}")
        out = torch.empty(*indices.shape, self._columns, dtype=torch.bfloat16)
        out_at = out.data_ptr()
        for index in chosen:
            block, within = divmod(index, self._block)
            codes_at = self._codes_at + block * self._half * self._planes * self._columns
            self._take(
                *(codes_at, self._scales_at + 4 * index, out_at, self._columns // GROUP, self._planes, self._half),
                *(self._byte[within], self._shift[within], self._stride),
            )
            out_at += 2 * self._columns
        return out
