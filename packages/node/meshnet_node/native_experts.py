"""Experts' products of a few rows as C code, over the weights that the CPU's products read too.

A step reads each chosen expert's matrices once, a few rows at most with each, so that what counts is how quickly they
come from memory. oneDNN's product of one row takes them in at 10 to 14 GB/s, a plain loop over the same bytes at 23 to
29 (one thread); and one call for a layer does what were some thirty operations. Stands in a module's place while it is
on; longer frames are the module's own. Knows no frames and no names of sessions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations import moe

from meshnet_node.kernel_library import COLUMN, MOST_SHARING, MixtureShape, StepKernels
from meshnet_node.laid_out_experts import LaidOutExperts

MOST_ROWS = 17
"""Beyond, an expert has many rows at once, for which the library's product is made."""

_FEW_THREADS = 2
"""Up to so many the kernel's one thread is the quicker."""


class NativeExperts:
    """One layer's. Not for two threads at once.

    Args:
        module: :meth:`can_run`; its ``forward`` is replaced between :meth:`enter` and :meth:`leave`.
        kernels: this machine's.

    Attributes:
        is_on: whether few rows are for it.
        failed: whether one of its calls raised.
    """

    def __init__(self, module: LaidOutExperts, kernels: StepKernels) -> None:
        self.is_on, self.failed = True, False
        self._module, self._plain, self._kernel = module, module.forward, kernels.experts
        stacks = (module.gate_up, module.down)
        self._addresses = [torch.tensor([torch.ops.mkldnn.data_ptr(each) for each in stack]) for stack in stacks]
        inner = module.down[0].shape[1]
        addresses = (each.data_ptr() for each in self._addresses)
        self._shape = MixtureShape(*addresses, module.count, 0, module.hidden, inner, 0)
        self._room = torch.empty(MOST_SHARING, 2 * inner + module.hidden, dtype=torch.bfloat16)

    @staticmethod
    def can_run(module: nn.Module) -> bool:
        """Whether ``module`` is such a mixture, of a form that the kernel has."""
        if not isinstance(module, LaidOutExperts) or not module.in_columns:
            return False
        if module.down[0].dtype is not torch.bfloat16:
            return False
        plain: Any = module.plain
        act = getattr(plain, "act_fn", None)
        is_silu = isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation"
        is_plain = getattr(type(plain), "_apply_gate", None) is moe._default_apply_gate
        return is_silu and is_plain and module.hidden % COLUMN == 0

    def enter(self) -> None:
        """Stand in the module's place."""
        self._module.forward = self.forward  # type: ignore[method-assign]

    def leave(self) -> None:
        """Let the module run by itself again."""
        del self._module.forward

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As the module's own: ``[positions, hidden]``, and ``[positions, k]`` twice."""
        rows = len(hidden_states)
        are_few = rows <= MOST_ROWS and torch.get_num_threads() <= _FEW_THREADS
        kinds = (hidden_states.dtype, top_k_index.dtype)
        if not (self.is_on and are_few and kinds == (torch.bfloat16, torch.int64)):
            return self._plain(hidden_states, top_k_index, top_k_weights)
        try:
            return self.run(hidden_states, top_k_index, top_k_weights)
        except BaseException:
            self.failed = True
            raise

    def run(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """The kernel's call."""
        rows, shape = len(hidden_states), self._shape
        shape.chosen, shape.rounds = top_k_index.shape[1], top_k_weights.dtype is torch.bfloat16
        given = (hidden_states.contiguous(), top_k_index.contiguous(), top_k_weights.float().contiguous())
        made, out = torch.empty(rows, shape.chosen, self._module.hidden), torch.empty_like(given[0])
        self._kernel(shape, rows, *(each.data_ptr() for each in (*given, self._room, made, out)))
        return out
