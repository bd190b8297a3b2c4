"""Modules that stand in for ``nn.Linear`` and ``nn.Embedding`` over a ``PackedMatrix``.

Plain modules with ``in_features`` and ``out_features``; two of them may share one matrix, as tied embeddings do. To
fuse several into one product: ``QuantisedLinear(PackedMatrix.joined([a.matrix, b.matrix]), joined biases)``. Inputs of
other dtypes are rounded to bfloat16, and the result goes back to theirs.
"""

from __future__ import annotations

import torch
from torch import nn

from meshnet_node.packed_matrix import PackedMatrix


class QuantisedLinear(nn.Module):
    """``inputs @ matrix.T + bias``; the bias is float, ``[out_features]``."""

    def __init__(self, matrix: PackedMatrix, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.matrix = matrix
        self.in_features, self.out_features = matrix.columns, matrix.rows
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` -> ``[..., out_features]``."""
        given = inputs.reshape(-1, self.in_features)
        if given.dtype is torch.bfloat16:
            out = self.matrix.product(given)
        else:
            out = self.matrix.product(given.to(torch.bfloat16)).to(inputs.dtype)
        if (bias := self.bias) is not None:
            out = out + bias
        return out.view(*inputs.shape[:-1], self.out_features)

    __call__ = forward  # nobody hangs hooks on it, and looking for them takes a tenth of a small product's time


class QuantisedEmbedding(nn.Module):
    """Rows of the matrix, in bfloat16; unpacked as they are looked up."""

    def __init__(self, matrix: PackedMatrix) -> None:
        super().__init__()
        self.matrix = matrix
        self.num_embeddings, self.embedding_dim = matrix.rows, matrix.columns

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """int64 ``[...]`` -> bfloat16 ``[..., embedding_dim]``."""
        return self.matrix.take(indices.reshape(-1)).reshape(*indices.shape, self.embedding_dim)
