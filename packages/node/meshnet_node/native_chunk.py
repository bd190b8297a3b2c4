"""A chunk through quick layers whose small operations, products and attention are C code.

    residual ── add, norm ── q, k, v ── norm, rope, into the slot ── attention ── output ── add, norm ── gates ── ...

What :mod:`meshnet_node.native_step` is for a position or a few, in bfloat16 and float32, with as many threads as torch
takes. Products are the modules' own (:mod:`meshnet_node.native_chunks` stands in them). Layers with sliding windows go
the quick layers' way. Knows no frames and no names of sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from meshnet_node.chunk_room import ChunkRoom
from meshnet_node.growing_cache import GrowingLayer
from meshnet_node.kernel_library import AttentionShape, StepKernels
from meshnet_node.native_chunk_attention import NativeChunkAttention, attends_in, has_kernel
from meshnet_node.native_step import is_gated
from meshnet_node.openmp import Team, team_here
from meshnet_node.quick_layer import QuickLayer, QuickMlp, RmsNorm


def native_chunk(
    base: Any, layers: Sequence[nn.Module], cache: DynamicCache, kernels: StepKernels, room: ChunkRoom
) -> NativeChunk | None:
    """The way of a view whose layers can be run so; None where they cannot.

    Args:
        base: the module that has them.
        layers: in order.
        cache: an empty one of theirs.
        kernels: this machine's.
        room: that others use in between.
    """
    known = [layer for layer in layers if isinstance(layer, QuickLayer)]
    if len(known) < max(1, len(layers)) or not all(_can_run(layer, kernels) for layer in known):
        return None
    if not all(type(slot) is GrowingLayer for slot in cache.layers):
        return None
    return NativeChunk(base, known, kernels, room)


def _can_run(layer: QuickLayer, kernels: StepKernels) -> bool:
    attention, norms = layer.self_attn, (layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
    alike = norms[0].dtype is norms[1].dtype and attends_in(norms[0].dtype, kernels)
    on_cpu = all(weight.device.type == "cpu" for weight in norms)
    return alike and on_cpu and has_kernel(attention.heads, attention.key_heads, attention.width)


class NativeChunk:
    """See the module. Not for two threads at once.

    Args:
        base: of a view: has the embedding, rope, and the norm behind the layers; what is no norm stands for none.
        layers: its own, in order.
        kernels: this machine's.
        room: see :func:`native_chunk`.

    Attributes:
        failed: whether a chunk raised, unless that was ``look``'s.
    """

    def __init__(self, base: Any, layers: Sequence[QuickLayer], kernels: StepKernels, room: ChunkRoom) -> None:
        self.failed = False
        attention = NativeChunkAttention(kernels, room)
        self._layers = [_ChunkLayer(layer, kernels, attention) for layer in layers]
        self._base, self._kernels = base, kernels
        self._norm = base.norm if isinstance(base.norm, RmsNorm) else None
        self._dtype = layers[0].input_layernorm.weight.dtype

    def run(
        self, inputs: torch.Tensor, position: int, cache: DynamicCache, look: Callable[[], None]
    ) -> torch.Tensor | None:
        """All layers, and the norm behind them.

        Args:
            inputs: token ids, int64 ``[1, count]``, or hidden states ``[1, count, hidden]``; not changed.
            position: how many came before.
            cache: filled with these.
            look: called before each layer; may raise.

        Returns:
            Hidden states ``[1, count, hidden]``; None, with nothing done, where torch's threads cannot be shared.
        """
        if (team := team_here()) is None:
            return None
        with self._noting_failure():
            hidden, turns = self._begin(inputs, position)
            residual, branch = hidden.clone(memory_format=torch.contiguous_format), None
        for number, layer in enumerate(self._layers):
            look()
            with self._noting_failure():
                residual, branch = layer.run(residual, branch, turns, cache.layers[number], team)
        with self._noting_failure():
            return self._ended(residual, branch, team)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.failed = True
            raise

    def _begin(self, inputs: torch.Tensor, position: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Hidden states, and cosines and sines of their positions."""
        hidden: torch.Tensor = self._base.embed_tokens(inputs) if inputs.dim() == 2 else inputs
        if hidden.dtype is not self._dtype:  # it is read by address
            raise TypeError(f"a native chunk takes hidden states in {self._dtype}, not in {hidden.dtype}")
        count = hidden.shape[1]
        at = torch.arange(position, position + count).unsqueeze(0)
        return hidden, tuple(each.reshape(count, -1).contiguous() for each in self._base.rotary_emb(hidden, at))

    def _ended(self, residual: torch.Tensor, branch: torch.Tensor | None, team: Team) -> torch.Tensor:
        if branch is None:
            raise ValueError("a view without layers has no chunks")
        branch = branch.contiguous()
        out = residual if self._norm is None else torch.empty_like(residual)
        weight, eps = (None, 0.0) if self._norm is None else (self._norm.weight.data_ptr(), self._norm.eps)
        addresses = (residual.data_ptr(), branch.data_ptr(), weight, out.data_ptr())
        self._kernels.chunk_add_norm(self._dtype is torch.float32, *addresses, *residual.shape[1:], eps, *team)
        return out


class _ChunkLayer:
    """One layer. What it gives is left as two summands, since the next one's sum and norm are one call."""

    def __init__(self, layer: QuickLayer, kernels: StepKernels, attention: NativeChunkAttention) -> None:
        own = layer.self_attn
        self._kernels, self._attention, self._own, self._mlp = kernels, attention, own, layer.mlp
        self._norms = (layer.input_layernorm, layer.post_attention_layernorm)
        self._is_float = self._norms[0].weight.dtype is torch.float32
        self._head_norm = None if own.eps is None else own.head_norm.contiguous()
        self._shape = AttentionShape(
            None if self._head_norm is None else self._head_norm.data_ptr(),
            *(own.heads, own.key_heads, own.width, own.turns, own.scaling, own.eps or 0.0),
        )
        self._like = torch.empty(1, own.key_heads, 1, own.width, dtype=self._norms[0].weight.dtype)

    def run(
        self,
        residual: torch.Tensor,
        branch: torch.Tensor | None,
        turns: tuple[torch.Tensor, ...],
        slot: Any,
        team: Team,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From two summands ``[1, count, hidden]`` of the hidden states, the second or none, to two others.

        Args:
            residual: its own; the sum is made in it.
            branch: not changed.
            turns: cosines and sines, ``[count, head_dim]`` each; the first half of the sines is negated.
            slot: this layer's.
            team: of threads.
        """
        own, first = self._own, self._added(residual, branch, 0, team)
        out: torch.Tensor = own.o_proj(self._attended(own.qkv_proj(first).contiguous(), turns, slot, team))
        normed = self._added(residual, out, 1, team)
        mlp = self._mlp
        if not (isinstance(mlp, QuickMlp) and is_gated(mlp)):
            return residual, mlp(normed)
        gates = mlp.gate_up_proj(normed).contiguous()
        gated = gates.new_empty(*gates.shape[:-1], gates.shape[-1] // 2)
        shape = (gated.shape[1], gated.shape[2])
        self._kernels.chunk_silu_mul(self._is_float, gates.data_ptr(), gated.data_ptr(), *shape, *team)
        return residual, mlp.down_proj(gated)

    def _added(self, residual: torch.Tensor, branch: torch.Tensor | None, norm: int, team: Team) -> torch.Tensor:
        """The sum, in ``residual``, and the norm of it."""
        out, own = torch.empty_like(residual), self._norms[norm]
        branch = None if branch is None else branch.contiguous()
        branch_at = None if branch is None else branch.data_ptr()
        addresses = (residual.data_ptr(), branch_at, own.weight.data_ptr(), out.data_ptr())
        shape = residual.shape[1:]
        self._kernels.chunk_add_norm(self._is_float, *addresses, *shape, own.eps, *team)
        return out

    def _attended(
        self, projected: torch.Tensor, turns: tuple[torch.Tensor, ...], slot: Any, team: Team
    ) -> torch.Tensor:
        """``[1, count, heads * width]`` of queries, keys and values side by side, which are changed."""
        own, count = self._own, projected.shape[1]
        like = self._like.expand(-1, -1, count, -1)
        keys, values = slot.reserve(like, like)
        self._kernels.chunk_take_in(
            *(self._shape, self._is_float, count, projected.data_ptr(), *(each.data_ptr() for each in turns)),
            *(keys.data_ptr(), values.data_ptr(), keys.stride(1), values.stride(1), keys.shape[2] - count, *team),
        )
        query = projected.view(1, count, -1, own.width)[:, :, : own.heads].transpose(1, 2)
        return self._attention.attend_all(query, keys, values, own.scaling, team).flatten(2)
