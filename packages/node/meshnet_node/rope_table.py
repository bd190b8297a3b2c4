"""Rope's cosines and sines as addresses, made for some hundred positions at once instead of for each step.

Only where a position's are the same whatever comes after it; else they are made anew each time. Knows no layers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from meshnet_node.quick_layer import QuickRope

BLOCK = 256
"""Positions that are made at once."""

MOST_BLOCKS = 64
"""Blocks that are kept: half a MiB each at most, for as many sessions at different places."""

_DEPENDS_ON_LENGTH = frozenset({"dynamic", "longrope"})
"""Kinds of rope whose frequencies change once a sequence is longer than some number."""

Turn = tuple[int, int]
"""Addresses of the cosines and of the sines, bfloat16 ``[head_dim]`` each; the first half of the sines is negated."""


class RopeTable:
    """For one view.

    Args:
        rope: the view's.
        like: dtype and device of hidden states.
    """

    def __init__(self, rope: QuickRope, like: torch.Tensor) -> None:
        own: Any = rope.rope
        self._rope, self._like = rope, like
        self._is_fixed = getattr(own, "rope_type", None) not in _DEPENDS_ON_LENGTH and hasattr(own, "rope_type")
        self._blocks: OrderedDict[int, _Block] = OrderedDict()  # the newest last
        self._last: list[_Block] = []  # what the addresses given last are in

    def at(self, positions: Sequence[int]) -> list[Turn]:
        """Of each position; what they point to stays until the next call."""
        self._last.clear()
        found = []
        for position in positions:
            number, within = divmod(position, BLOCK) if self._is_fixed else (position, 0)
            block = self._blocks.get(number)
            if block is None:
                block = _Block(self._rope, self._like, position - within, BLOCK if self._is_fixed else 1)
                if self._is_fixed:
                    self._blocks[number] = block
                    if len(self._blocks) > MOST_BLOCKS:
                        self._blocks.popitem(last=False)
            elif len(self._blocks) == MOST_BLOCKS:
                self._blocks.move_to_end(number)
            self._last.append(block)
            found.append((block.cosines_at + within * block.row, block.sines_at + within * block.row))
        return found


class _Block:
    """So many positions from ``start`` on."""

    def __init__(self, rope: QuickRope, like: torch.Tensor, start: int, count: int) -> None:
        turns = rope(like, torch.arange(start, start + count).unsqueeze(0))
        self._held = tuple(each.contiguous() for each in turns)
        self.cosines_at, self.sines_at = (each.data_ptr() for each in self._held)
        self.row = self._held[0].shape[-1] * self._held[0].element_size()
