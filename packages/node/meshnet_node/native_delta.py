"""Layers with a gated delta rule (Qwen3-Next, Qwen3.5), the rule being C code.

    product ── convolution, rule, norm, gate ── product

A layer's state is a matrix for each head, a megabyte and more in all. As operations of torch a step goes over it six
times, and for several sessions copies it to where they lie together and back; the kernel reads and writes each
session's own once (:mod:`meshnet_node.step_kernels`). Several positions of one session go one after the other, with the
state in the core's cache: with few threads that takes a third of what transformers' rule for chunks does. Stands in a
module's place while it is on; what has no cache is the module's own. Knows no frames and no names of sessions.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from meshnet_node.kernel_library import MOST_WIDTH, DeltaShape, StepKernels
from meshnet_node.ragged_cache import RaggedCache

_ORDERED = ("in_proj_qkvz", "in_proj_ba")  # Qwen3-Next's, by heads
_APART = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")  # Qwen3.5's
_FEW_THREADS = 2
"""Up to so many the kernel's one thread is the quicker for several positions."""
_HAS = (
    *("layer_idx", "activation", "num_v_heads", "num_k_heads", "head_v_dim", "head_k_dim"),
    *("conv1d", "A_log", "dt_bias", "norm", "out_proj"),
)
_NORM_HAS = ("weight", "variance_epsilon", "activation")


class NativeDelta:
    """One layer's. Not for two threads at once.

    Args:
        module: transformers', :meth:`can_run`; its ``forward`` is replaced between :meth:`enter` and :meth:`leave`.
        kernels: this machine's.

    Attributes:
        index: of the layer, in its view.
        is_on: whether frames are for it.
        failed: whether one raised here.
    """

    def __init__(self, module: Any, kernels: StepKernels) -> None:
        self.index: int = module.layer_idx
        self.is_on, self.failed = True, False
        self._module, self._plain, self._kernel = module, module.forward, kernels.delta
        self._ordered = hasattr(module, _ORDERED[0])
        self._conv = module.conv1d.weight.squeeze(1).contiguous()
        self._norm = module.norm.weight
        self._rate = -module.A_log.detach().float().exp()
        self._step_bias = module.dt_bias.detach().float().clone()
        self._shape = DeltaShape(
            *(held.data_ptr() for held in (self._conv, self._rate, self._step_bias, self._norm)),
            *(module.num_v_heads, module.num_k_heads, module.head_v_dim, module.head_k_dim, self._conv.shape[1]),
            module.norm.variance_epsilon,
        )
        self._room = torch.empty(self._conv.shape[0])

    @staticmethod
    def can_run(module: Any) -> bool:
        """Whether ``module`` is such a layer, of a form that the kernel has, in bfloat16 on a CPU."""
        if not all(hasattr(module, name) for name in _HAS):
            return False
        if not any(all(hasattr(module, name) for name in form) for form in (_ORDERED, _APART)):
            return False
        conv, norm = module.conv1d, module.norm
        if not all(hasattr(norm, name) for name in _NORM_HAS):
            return False
        heads, channels = module.num_v_heads, 2 * module.num_k_heads * module.head_k_dim
        channels += heads * module.head_v_dim
        return (
            all(of.weight.dtype is torch.bfloat16 and of.weight.device.type == "cpu" for of in (conv, norm))
            and conv.bias is None
            and getattr(norm, "activation", None) == module.activation == "silu"
            and module.head_v_dim <= MOST_WIDTH
            and heads % module.num_k_heads == 0
            and conv.weight.shape[:2] == (channels, 1)
            and norm.weight.shape == (module.head_v_dim,)
            and module.A_log.shape == module.dt_bias.shape == (heads,)
        )

    def enter(self) -> None:
        """Stand in the module's place."""
        self._module.forward = self.forward

    def leave(self) -> None:
        """Let the module run by itself again."""
        del self._module.forward

    def forward(self, hidden_states: torch.Tensor, cache: DynamicCache | None = None, **others: Any) -> torch.Tensor:
        """As the module's own; hidden states ``[rows, seq_len, hidden]``.

        Args:
            cache: of one session, or a `RaggedCache` of as many as there are rows, which keeps this layer's apart.
        """
        is_ours = self.is_on and cache is not None and others.get("attention_mask") is None
        if is_ours and (slots := self._slots(cache, *hidden_states.shape[:2])):
            try:
                return self._step(hidden_states, slots)
            except BaseException:
                self.failed = True
                raise
        found: torch.Tensor = self._plain(hidden_states, cache=cache, **others)
        return found

    def _slots(self, cache: Any, rows: int, seq_len: int) -> tuple[Any, ...]:
        """Of each position its session's; none where they are not for the kernel."""
        if isinstance(cache, RaggedCache):
            return cache.rows_of(self.index)
        if rows > 1 or (seq_len > 1 and torch.get_num_threads() > _FEW_THREADS):
            return ()
        slot = cache.layers[self.index]
        return (slot,) * seq_len if self.takes(slot) else ()

    def takes(self, slot: Any) -> bool:
        """Whether it holds state as the kernel reads it, or none yet."""
        if type(slot) is not LinearAttentionLayer or slot.record_past:
            return False
        if not slot.has_previous_state[0]:
            return True
        columns, state, at = slot.conv_states[0], slot.recurrent_states[0], self._shape
        return (
            columns is not None
            and state is not None
            and columns.shape == (1, *self._conv.shape)
            and state.shape == (1, at.heads, at.key_width, at.width)
            and (columns.dtype, state.dtype) == (torch.bfloat16, torch.float32)
            and columns.is_contiguous()
            and state.is_contiguous()
        )

    def _begin(self, slot: Any) -> None:
        """Give it the state before any position."""
        at = self._shape
        columns = torch.zeros(1, *self._conv.shape, dtype=torch.bfloat16)
        slot.lazy_initialization(conv_states=columns, conv_kernel_size=at.taps)
        slot.lazy_initialization(recurrent_states=torch.zeros(1, at.heads, at.key_width, at.width))
        slot.has_previous_state[0] = True

    def _step(self, hidden: torch.Tensor, slots: Sequence[Any]) -> torch.Tensor:
        """Positions of as many slots, those of one slot in order."""
        given = [each.contiguous() for each in self._projected(hidden)]
        if any(each.dtype is not torch.bfloat16 for each in given):
            raise TypeError(f"a native rule is in bfloat16, not in {', '.join(str(each.dtype) for each in given)}")
        if not slots[0].has_previous_state[0]:  # a session's first frame, which none shares
            self._begin(slots[0])
        out = torch.empty(*hidden.shape[:2], self._shape.heads * self._shape.width, dtype=torch.bfloat16)
        kept = array("q")
        for slot in slots:
            kept.extend((slot.conv_states[0].data_ptr(), slot.recurrent_states[0].data_ptr()))
        addresses = (each.data_ptr() for each in (*given, self._room, out))
        self._kernel(self._shape, len(slots), kept.buffer_info()[0], *addresses)
        found: torch.Tensor = self._module.out_proj(out)
        return found

    def _projected(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``[rows, seq_len, ...]``: queries, keys and values mixed; gates; shares; steps."""
        module = self._module
        if not self._ordered:
            return tuple(getattr(module, name)(hidden) for name in _APART)
        query, key, value, gate, share, step = module.fix_query_key_value_ordering(
            *(getattr(module, name)(hidden) for name in _ORDERED)
        )
        mixed = torch.cat([each.flatten(2) for each in (query, key, value)], dim=-1)
        return mixed, gate, share, step
