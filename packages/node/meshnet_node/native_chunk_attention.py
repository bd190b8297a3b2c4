"""Attention of a chunk's positions as C code, in float32 whatever comes in.

torch's kernel for the CPU multiplies bfloat16 slowly (:mod:`meshnet_node.chunk_attention`), and products of bfloat16
are no quicker than those of float32 on some CPUs. Here keys and values are widened a block at a time, and stay in the
core's caches while all queries go over them. Knows no modules.
"""

from __future__ import annotations

import weakref

import torch

from meshnet_node.chunk_room import ChunkRoom
from meshnet_node.kernel_library import COLUMN, ChunkShape, ProductWay, StepKernels
from meshnet_node.openmp import Team, team_here

_WIDEST = 256
_MOST_SHARING = 64
_WAYS = {torch.bfloat16: ProductWay.WIDENED, torch.float32: ProductWay.FLOATS}


class NativeChunkAttention:
    """Of any layer, with room of its own. Not for two threads at once.

    Args:
        kernels: this machine's.
        room: that others use in between.
    """

    def __init__(self, kernels: StepKernels, room: ChunkRoom) -> None:
        self._kernels, self._room = kernels, room
        self._seen: weakref.ref[torch.Tensor] | None = None  # a mask that hides what comes after, and no more

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
    ) -> torch.Tensor | None:
        """As :func:`~meshnet_node.chunk_attention.attend_chunk`, or None for a form that the kernel has not."""
        count, positions = query.shape[2], key.shape[2]
        if not _suits(query, key, value) or not self._sees_all_before(mask, count, positions):
            return None
        team = team_here()
        return None if team is None else self.attend_all(query, key, value, scaling, team)

    def attend_all(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, team: Team
    ) -> torch.Tensor:
        """The same, of a form that the kernel has; each position sees all that does not come after it."""
        _, heads, count, width = query.shape
        out = query.new_empty(1, count, heads, width)
        addresses = (each.data_ptr() for each in (query, key, value, out))
        strides = (query.stride(2), query.stride(1), key.stride(1), value.stride(1))
        sizes = (heads, key.shape[1], width, key.shape[2], count)
        shape = ChunkShape(*addresses, *strides, *sizes, _WAYS[query.dtype], scaling)
        at = self._room.at(team.threads * self._kernels.chunk_room(width))
        self._kernels.attend_chunk(shape, at, *team)
        return out

    def _sees_all_before(self, mask: torch.Tensor | None, count: int, positions: int) -> bool:
        """Whether each query sees all that does not come after it. Looked at once for the layers that share a mask."""
        if mask is None:
            return count == positions
        if self._seen is not None and self._seen() is mask:
            return True
        if mask.dtype is not torch.bool or mask.shape != (1, 1, count, positions) or count > positions:
            return False
        seen, before = mask[0, 0], positions - count
        # By bytes: a seventh of the time of all().
        if before and not bool(seen[:, :before].view(torch.uint8).min()):
            return False
        if not torch.equal(seen[:, before:], torch.ones(count, count, dtype=torch.bool).tril_()):
            return False
        self._seen = weakref.ref(mask)
        return True


def attends_in(dtype: torch.dtype, kernels: StepKernels) -> bool:
    """Whether the kernel is for ``dtype`` here: with AMX torch's own multiplies bfloat16 at many times the speed."""
    if dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        return False
    return _WAYS.get(dtype) in kernels.product_ways


def has_kernel(heads: int, key_heads: int, width: int) -> bool:
    """Whether the kernel has heads of these numbers and this width."""
    sharing, left = divmod(heads, key_heads)
    return width % COLUMN == 0 and width <= _WIDEST and not left and sharing <= _MOST_SHARING


def _suits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    batch, heads, _, width = query.shape
    alike = query.dtype is key.dtype is value.dtype and query.dtype in _WAYS and key.shape == value.shape
    dense = query.stride(3) == 1 and all(each.stride()[2:] == (width, 1) for each in (key, value))
    return (
        batch == 1
        and query.is_cpu
        and alike
        and dense
        and key.shape[3] == width
        and has_kernel(heads, key.shape[1], width)
    )
