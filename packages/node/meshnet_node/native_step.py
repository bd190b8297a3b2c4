"""A step through quick layers whose small operations are C code: one position of each of several sessions, or a few
of one.

    product ── attend ── product ── add, norm ── product ── silu, mul ── product ── add, norm ── ...

Products are ours where dense weights lie in columns, else torch's; between them is one call
each (:mod:`meshnet_node.step_kernels`). A position's keys and values are written where the session's slots keep them.
The sums are those of the quick layers themselves, but for attention, which rounds less. Knows no frames and no names of
sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from meshnet_node.growing_cache import GrowingLayer, GrowingWindowLayer
from meshnet_node.kernel_library import MOST_WIDTH, ProductWay, StepKernels
from meshnet_node.native_attention import NativeAttention
from meshnet_node.native_chunks import has_products, shape_of
from meshnet_node.native_embedding import native_embedding
from meshnet_node.native_products import multiply_few
from meshnet_node.native_room import NativeRoom, RoomShape
from meshnet_node.packed_linear import PackedLinear
from meshnet_node.quantised_layers import QuantisedLinear
from meshnet_node.quick_layer import QuickLayer, QuickMlp, RmsNorm
from meshnet_node.rope_table import RopeTable, Turn

Product = Callable[[torch.Tensor], torch.Tensor]
"""bfloat16 ``[rows, in]`` -> ``[rows, out]``, dense and its own."""

MOST_ROWS = 17
"""Positions of one session that are run as rows, one after the other through attention: a step's and its drafts'."""


def native_step(base: Any, layers: Sequence[nn.Module], cache: DynamicCache, kernels: StepKernels) -> NativeStep | None:
    """The step of a view whose layers can be run so; None where they cannot.

    Args:
        base: the module that has them.
        layers: in order.
        cache: an empty one of theirs.
        kernels: this machine's.
    """
    known = [layer for layer in layers if isinstance(layer, QuickLayer)]
    if len(known) < max(1, len(layers)) or not all(map(_can_run, known)):
        return None
    if len({_shape_of(layer)._replace(gated=0) for layer in known}) > 1 or len(_gated_widths(known)) > 1:
        return None
    if not all(type(slot) in {GrowingLayer, GrowingWindowLayer} for slot in cache.layers):
        return None
    return NativeStep(base, known, kernels)


def _can_run(layer: QuickLayer) -> bool:
    attention = layer.self_attn
    norms = (layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
    are_plain = all(weight.dtype is torch.bfloat16 and weight.device.type == "cpu" for weight in norms)
    in_pairs = attention.width % 2 == 0 and attention.heads % attention.key_heads == 0
    return are_plain and in_pairs and attention.width <= MOST_WIDTH


def _shape_of(layer: QuickLayer) -> RoomShape:
    mlp: Any = layer.mlp
    gated = int(mlp.down_proj.in_features) if is_gated(mlp) else 0
    return RoomShape(layer.input_layernorm.weight.numel(), layer.self_attn.heads * layer.self_attn.width, gated)


def _gated_widths(layers: Sequence[QuickLayer]) -> set[int]:
    return {_shape_of(layer).gated for layer in layers} - {0}


def is_gated(mlp: nn.Module) -> bool:
    """Whether an MLP is ``down(silu(gate(x)) * up(x))``; whatever else stands there is called as it is."""
    if not isinstance(mlp, QuickMlp):
        return False
    act = mlp.act_fn
    return isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation"


class NativeStep:
    """See the module. Not for two threads at once.

    Args:
        base: of a view: has the embedding, rope, and the norm behind the layers; what is no norm stands for none.
        layers: its own, in order, of one shape; some may have experts.
        kernels: this machine's.
    """

    def __init__(self, base: Any, layers: Sequence[QuickLayer], kernels: StepKernels) -> None:
        self._layers = [_NativeLayer(layer, kernels) for layer in layers]
        self._norm = base.norm if isinstance(base.norm, RmsNorm) else None
        self._embed = native_embedding(base.get_input_embeddings(), kernels)
        self._rope = RopeTable(base.rotary_emb, layers[0].input_layernorm.weight)
        self._kernels = kernels
        self._shape = _shape_of(layers[0])._replace(gated=max(_gated_widths(layers), default=0))
        self._rooms: dict[int, NativeRoom] = {}

    def run(
        self,
        inputs: torch.Tensor,
        positions: Sequence[int],
        caches: Sequence[DynamicCache],
        look: Callable[[], None],
    ) -> torch.Tensor:
        """All layers, and the norm behind them.

        Args:
            inputs: rows, each of a session's next position; those of one session in order. Token ids, int64 ``[rows,
                1]``, or hidden states, bfloat16 ``[rows, 1, hidden]``; not changed.
            positions: of each row, how many came before; at least 1.
            caches: of each row, filled with as many as came before the session's first.
            look: called before each layer; may raise.

        Returns:
            Hidden states ``[rows, 1, hidden]``.
        """
        rows = len(caches)
        if rows not in self._rooms:
            self._rooms[rows] = NativeRoom(rows, self._shape)
        room = self._rooms[rows]
        turns = self._rope.at(positions)
        hidden = self._embed(inputs) if inputs.dim() == 2 else inputs
        if hidden.dtype is not torch.bfloat16:  # it is read by address
            raise TypeError(f"a native step takes hidden states in bfloat16, not in {hidden.dtype}")
        residual = hidden.reshape(rows, -1).contiguous()
        branch = None
        for number, layer in enumerate(self._layers):
            look()
            residual, branch = layer.run(residual, branch, room, turns, [cache.layers[number] for cache in caches])
        return self._ended(residual, branch).view_as(hidden)

    @property
    def attentions(self) -> list[NativeAttention]:
        """Of each layer, for who wants to see them run."""
        return [layer.attention for layer in self._layers]

    def _ended(self, residual: torch.Tensor, branch: torch.Tensor | None) -> torch.Tensor:
        if branch is None:
            raise ValueError("a view without layers has no step")
        rows = len(residual)
        if self._norm is None:
            self._kernels.add(branch.data_ptr(), residual.data_ptr(), residual.numel())
            return branch
        out = torch.empty_like(residual)
        weight = self._norm.weight.data_ptr()
        self._kernels.add_norm(
            branch.data_ptr(), residual.data_ptr(), weight, out.data_ptr(), rows, self._shape.hidden, self._norm.eps
        )
        return out


class _NativeLayer:
    """One layer. What it gives is left as two summands, since the next one's sum and norm are one call."""

    def __init__(self, layer: QuickLayer, kernels: StepKernels) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._kernels = kernels
        self._norms = (layer.input_layernorm, layer.post_attention_layernorm)  # hold what the addresses are of
        self._weight_at, self._second_weight_at = (norm.weight.data_ptr() for norm in self._norms)
        self._eps, self._second_eps = (norm.eps for norm in self._norms)
        self.attention = NativeAttention(attention, kernels)
        self._project, self._project_out = (
            product_of(module, kernels) for module in (attention.qkv_proj, attention.o_proj)
        )
        self._mlp: Product = _as_rows(mlp)
        self._project_gates: Product | None = None
        if isinstance(mlp, QuickMlp) and is_gated(mlp):
            self._project_gates = product_of(mlp.gate_up_proj, kernels)
            self._mlp = product_of(mlp.down_proj, kernels)

    def run(
        self,
        residual: torch.Tensor,
        branch: torch.Tensor | None,
        room: NativeRoom,
        turns: Sequence[Turn],
        slots: Sequence[Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From two summands ``[rows, hidden]`` of the hidden states, the second or none, to two others.

        Args:
            residual: not changed.
            branch: its own; its memory is used.
            room: for so many rows.
            turns: of each session's position.
            slots: of each session, for this layer.
        """
        kernels, rows, width = self._kernels, room.rows, room.shape.hidden
        if branch is None:
            kernels.norm(residual.data_ptr(), self._weight_at, room.normed_at, rows, width, self._eps)
        else:
            own = branch.data_ptr()
            kernels.add_norm(own, residual.data_ptr(), self._weight_at, room.normed_at, rows, width, self._eps)
            residual = branch
        self.attention.run(self._project(room.normed), room, turns, slots)
        out = self._project_out(room.attended)
        kernels.add_norm(
            *(out.data_ptr(), residual.data_ptr(), self._second_weight_at, room.normed_at),
            *(rows, width, self._second_eps),
        )
        if self._project_gates is None:
            return out, self._mlp(room.normed)
        gates = self._project_gates(room.normed)
        kernels.silu_mul(gates.data_ptr(), room.gated_at, rows, room.shape.gated)
        return out, self._mlp(room.gated)


def product_of(module: nn.Module, kernels: StepKernels) -> Product:
    """A module's product, by the shortest way for a few rows. Holds its weights, whatever becomes of the module."""
    if isinstance(module, QuantisedLinear) and module.bias is None and module.matrix.is_whole:
        return module.matrix.product_of_few()
    if isinstance(module, PackedLinear):
        return _few_of(module, kernels) if has_products(module) else module.product_of_few()
    return _as_rows(module)


def _few_of(linear: PackedLinear, kernels: StepKernels) -> Product:
    plain = linear.product_of_few()  # holds the tensors
    shape = shape_of(linear, ProductWay.PAIRS)

    def product(inputs: torch.Tensor) -> torch.Tensor:
        found = multiply_few(kernels, shape, inputs)
        return plain(inputs) if found is None else found

    return product


def _as_rows(module: nn.Module) -> Product:
    """``module``, which takes ``[rows, 1, in]``, over ``[rows, in]``."""

    def product(inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = module(inputs.unsqueeze(1))
        return out.reshape(len(inputs), -1).contiguous()

    return product
