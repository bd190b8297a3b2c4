"""Attention of one layer in a native step: between two products, one call for each row.

Knows slots of a cache, no layers and no sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshnet_node.cpu_attention import attend
from meshnet_node.kernel_library import ATTENDED, AttentionShape, StepKernels
from meshnet_node.native_room import NativeRoom
from meshnet_node.openmp import Team, team_here
from meshnet_node.quick_layer import QuickAttention
from meshnet_node.rope_table import Turn

_FEW_VALUES = 1 << 17
"""Of a position's queries, times positions: up to so many, one thread is as quick as a team."""
_ONE_THREAD = Team(1, None)


class NativeAttention:
    """The attention of one layer, without its products."""

    def __init__(self, attention: QuickAttention, kernels: StepKernels) -> None:
        self._module = attention
        self._heads, self._width, self._scaling = attention.heads, attention.width, attention.scaling
        self._head_norm = None if attention.eps is None else attention.head_norm.contiguous()
        self._shape = AttentionShape(
            None if self._head_norm is None else self._head_norm.data_ptr(),
            *(attention.heads, attention.key_heads, attention.width, attention.turns),
            *(attention.scaling, attention.eps or 0.0),
        )
        self._row_bytes = (attention.heads + 2 * attention.key_heads) * attention.width * 2
        self._out_bytes = attention.heads * attention.width * 2
        self._like = torch.empty(1, attention.key_heads, 1, attention.width, dtype=torch.bfloat16)
        self._block_values = attention.heads * (attention.width + 2)
        self._attend, self._attend_long = kernels.attend, kernels.attend_long

    def run(self, projected: torch.Tensor, room: NativeRoom, turns: Sequence[Turn], slots: Sequence[Any]) -> None:
        """From queries, keys and values ``[rows, ...]``, which are changed, to ``room.attended``."""
        at, out_at = projected.data_ptr(), room.attended_at
        for row, (turn, slot) in enumerate(zip(turns, slots, strict=True)):
            keys, values = slot.reserve(self._like, self._like)
            positions = keys.shape[2]
            are_few = positions * self._heads * self._width <= _FEW_VALUES
            team = _ONE_THREAD if are_few else team_here()
            blocks_at = room.blocks_at(-(-positions // ATTENDED) * self._block_values)
            (self._attend if are_few else self._attend_long)(
                *(self._shape, at, *turn, keys.data_ptr(), values.data_ptr()),
                *(keys.stride(1), values.stride(1), positions, blocks_at),
                *(None if team is None else out_at, *(team or _ONE_THREAD)),
            )
            if team is None:
                self._attend_with_torch(projected[row], keys, values, room.attended[row])
            at, out_at = at + self._row_bytes, out_at + self._out_bytes

    def _attend_with_torch(
        self, projected: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        """With torch's threads, where kernels cannot share them; the queries are normed and turned."""
        query = projected[: self._heads * self._width].view(1, self._heads, 1, self._width)
        found, _ = attend(self._module, query, keys, values, None, scaling=self._scaling)
        out.copy_(found.reshape(-1))
