"""Several linear modules of one input as one: their weights under one another, so that a single product gives all.

For a single position a call of a product costs as much as reading a small weight does. Knows modules only: no
families, no files.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from meshnet_node.packed_layout import ROW_BLOCK
from meshnet_node.packed_matrix import PackedMatrix
from meshnet_node.quantised_layers import QuantisedLinear


class BesideLinears(nn.Module):
    """Modules whose weights cannot be joined, called one after the other: the same result, without the gain."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` -> the outputs of all, in order, along the last dimension."""
        return torch.cat([part(inputs) for part in self.parts], dim=-1)


def joined(parts: Sequence[nn.Module]) -> nn.Module:
    """One module that gives what ``parts`` give, in order, along the last dimension.

    Args:
        parts: of one input, without gradients. Those that were joined are empty afterwards: their memory is free at
            once, and not when somebody looks for garbage.
    """
    quantised = [part for part in parts if type(part) is QuantisedLinear]
    whole: nn.Module
    if all(type(part) is nn.Linear for part in parts):
        whole = _joined_linears([part for part in parts if isinstance(part, nn.Linear)])
    elif len(quantised) == len(parts) and _matrices_join([part.matrix for part in quantised]):
        matrix = PackedMatrix.joined([part.matrix for part in quantised])
        whole = QuantisedLinear(matrix, _joined_biases([part.bias for part in quantised], parts))
    else:
        return BesideLinears(parts)
    for module in (each for part in parts for each in part.modules()):
        module._parameters.clear()
        module._buffers.clear()
    return whole


def _joined_linears(parts: Sequence[nn.Linear]) -> nn.Module:
    whole = nn.Linear(parts[0].in_features, sum(part.out_features for part in parts), bias=False, device="meta")
    whole.weight = nn.Parameter(torch.cat([part.weight.detach() for part in parts]), requires_grad=False)
    bias = _joined_biases([part.bias for part in parts], parts)
    whole.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
    return whole


def _joined_biases(biases: Sequence[torch.Tensor | None], parts: Sequence[nn.Module]) -> torch.Tensor | None:
    """Of all, zeros where one has none; None where none has any."""
    given = next((bias for bias in biases if bias is not None), None)
    if given is None:
        return None
    widths = [int(part.out_features) for part in parts]  # type: ignore[arg-type]
    filled = [given.new_zeros(width) if bias is None else bias for bias, width in zip(biases, widths, strict=True)]
    return torch.cat([bias.detach() for bias in filled])


def _matrices_join(matrices: Sequence[PackedMatrix]) -> bool:
    return len({(each.columns, each.planes) for each in matrices}) == 1 and not any(
        each.rows % ROW_BLOCK for each in matrices[:-1]
    )
