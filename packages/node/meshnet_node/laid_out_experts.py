"""The experts of a mixture with weights laid out as a CPU's products read them, in place of transformers' modules.

What :mod:`meshnet_node.packed_linear` does for a matrix, done for each expert's two. transformers keeps a layer's
experts as two stacks, whose grouped product rearranges every chosen expert's weights in every call: half of a decode
step's products, and as much again for each chunk of a prefill. Rows are grouped, weighted and added up as its grouped
way does it, so that bfloat16 results have the same bits. Knows modules only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshnet_node.column_layout import lies_in_columns
from meshnet_node.packed_experts import EXPERT_WEIGHTS, is_packable
from meshnet_node.packed_linear import MANY_ROWS, is_worth_it, laid_out


class LaidOutExperts(nn.Module):
    """As the module that it was made from, which gives it its gate.

    Args:
        experts: transformers' module, of the plain form (:func:`~meshnet_node.packed_experts.is_packable`), on a CPU
            and without gradients; its two parameters are taken away.

    Attributes:
        gate_up, down: each expert's matrices, in the library's layout.
        in_columns: whether that is :mod:`meshnet_node.column_layout`'s.
        of_many: another product for many rows, ``[n, in]``, and one of the matrices; gives None for those that are none
            of its.
    """

    of_many: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None] | None = None

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.count, self.hidden = experts.gate_up_proj.shape[0], experts.gate_up_proj.shape[-1]
        stacks = [nn.ParameterList(), nn.ParameterList()]
        self.in_columns = True
        for name, laid in zip(EXPERT_WEIGHTS, stacks, strict=True):
            stack = experts._parameters.pop(name).detach()
            laid.extend(nn.Parameter(laid_out(expert), requires_grad=False) for expert in stack)
            self.in_columns = self.in_columns and bool(lies_in_columns(laid[0], stack[0]))
        self.plain = experts
        self.gate_up, self.down = stacks

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sums of what each position's experts make of it.

        Args:
            hidden_states: ``[positions, hidden]``.
            top_k_index, top_k_weights: ``[positions, k]``; an index of :attr:`count` is no expert.
        """
        positions, chosen = top_k_index.shape
        experts, order = top_k_index.reshape(-1).sort()
        counts = torch.bincount(experts, minlength=self.count)[: self.count].tolist()
        if not any(counts):
            return torch.zeros_like(hidden_states)
        rows = hidden_states[order // chosen]
        gated = self.plain._apply_gate(self._products(rows, self.gate_up, counts)).contiguous()
        made = self._products(gated, self.down, counts) * top_k_weights.reshape(-1)[order[: len(gated)], None]
        weighted = made.new_zeros(len(order), self.hidden) if len(made) < len(order) else torch.empty_like(made)
        weighted[order[: len(made)]] = made
        return weighted.view(positions, chosen, self.hidden).sum(dim=1).to(hidden_states.dtype)

    def _products(self, rows: torch.Tensor, weights: nn.ParameterList, counts: list[int]) -> torch.Tensor:
        """Of each expert's rows, which lie one after the other; rows behind the last expert's are left out."""
        made, start = [], 0
        for expert, count in enumerate(counts):
            if count:
                made.append(self._product(rows[start : start + count], weights[expert]))
                start += count
        return torch.cat(made) if len(made) != 1 else made[0]

    def _product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.of_many is not None and len(rows) >= MANY_ROWS and (found := self.of_many(rows, weight)) is not None:
            return found
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, weight, None, "none", [], "")
        return product


def lay_out_experts(model: nn.Module) -> None:
    """Replace, one after the other, all experts of ``model`` on a CPU that are of the plain form and large enough.

    Args:
        model: without gradients.
    """
    # Names and not modules are listed: a list would keep every stack until the last is laid out.
    for parent in list(model.modules()):
        for name in [name for name, module in parent.named_children() if is_packable(module)]:
            experts: Any = parent.get_submodule(name)
            if all(is_worth_it(getattr(experts, weights)[0]) for weights in EXPERT_WEIGHTS):
                setattr(parent, name, LaidOutExperts(experts))
