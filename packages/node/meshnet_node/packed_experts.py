"""The experts of a mixture over packed matrices, in place of transformers' modules that hold them as 3-D parameters.

transformers 5 fuses a layer's experts into ``gate_up_proj`` ``[experts, 2 * inner, hidden]`` and ``down_proj``
``[experts, hidden, inner]`` and dispatches them by ``use_experts_implementation``, whose flags tell what a family does
otherwise: biases, transposed or interleaved weights. Those stay as they are. Products here go expert by expert, as its
eager way does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshnet_node.packed_matrix import PackedStack

EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")


def is_packable(module: nn.Module) -> bool:
    """Whether it is a module of experts of the plain form: gate and up side by side, no biases, no norms between."""
    experts: Any = module
    three = all(getattr(getattr(module, name, None), "dim", lambda: 0)() == 3 for name in EXPERT_WEIGHTS)
    plain = [name for name in ("has_bias", "is_transposed", "has_post_expert_norm") if getattr(module, name, True)]
    return three and not plain and bool(experts.has_gate and experts.is_concatenated)


class PackedExperts(nn.Module):
    """As the module that it was made from, which gives it its gate.

    Args:
        experts: transformers' module; its two parameters are taken away.
        gate_up, down: what they were, packed.
    """

    def __init__(self, experts: nn.Module, gate_up: PackedStack, down: PackedStack) -> None:
        super().__init__()
        for name in EXPERT_WEIGHTS:
            experts._parameters.pop(name, None)
        self.plain = experts
        self.gate_up, self.down = gate_up, down

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sums of what each position's experts make of it.

        Args:
            hidden_states: ``[positions, hidden]``.
            top_k_index, top_k_weights: ``[positions, k]``; an index of ``count`` is no expert.
        """
        gated: Any = self.plain
        out = torch.zeros_like(hidden_states)
        given = hidden_states.to(torch.bfloat16)
        for expert in sorted(set(top_k_index.reshape(-1).tolist())):
            if expert >= self.gate_up.count:
                continue
            rows, slot = torch.where(top_k_index == expert)
            inner = gated._apply_gate(self.gate_up[expert].product(given[rows]))
            made = self.down[expert].product(inner.contiguous()) * top_k_weights[rows, slot, None]
            out.index_add_(0, rows, made.to(out.dtype))
        return out
