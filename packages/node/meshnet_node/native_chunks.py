"""What of a chunk's way through layers is C code, beside each module's own: products, a step's too, and attention.

A module's own stands where the kernels have no form for it, or are off. Knows which modules have one, and no frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from meshnet_node.chunk_room import ChunkRoom
from meshnet_node.kernel_library import MatrixShape, ProductWay, StepKernels
from meshnet_node.laid_out_experts import LaidOutExperts
from meshnet_node.native_chunk_attention import NativeChunkAttention, attends_in
from meshnet_node.native_products import IN_STEP, matrix_shape, multiply, multiply_few, quickest_way
from meshnet_node.packed_linear import PackedLinear
from meshnet_node.quick_layer import QuickAttention

OF_MANY, OF_FEW, OF_CHUNK = "of_many", "of_few", "of_chunk"
"""The attributes of modules where kernels stand: for products of a chunk and of a step, and for a chunk's attention."""
KERNEL_PLACES = (OF_MANY, OF_FEW, OF_CHUNK)


class NativeChunks:
    """Of some layers. Not for two threads at once.

    Args:
        layers: that are looked through.
        kernels: this machine's.
        room: that others use in between.

    Attributes:
        is_on: whether frames are for them.
        failed: whether one of their calls raised.
    """

    def __init__(self, layers: Iterable[nn.Module], kernels: StepKernels, room: ChunkRoom) -> None:
        self.is_on, self.failed = True, False
        self._kernels, self._room = kernels, room
        self._placed: list[tuple[nn.Module, str]] = []
        try:
            self._place_all([module for layer in layers for module in layer.modules()])
        except BaseException:
            self.leave()
            raise

    def __len__(self) -> int:
        return len(self._placed)

    @property
    def in_steps(self) -> bool:
        """Whether some are for frames of a position or a few."""
        return any(name == OF_FEW for _, name in self._placed)

    def leave(self) -> None:
        """Let all modules run by themselves again."""
        for module, name in self._placed:
            delattr(module, name)
        self._placed.clear()

    def _place_all(self, modules: Iterable[nn.Module]) -> None:
        attention = NativeChunkAttention(self._kernels, self._room)
        for module in modules:
            if has_products(module):
                self._place_products(module)
            elif attends(module) and all(attends_in(each.dtype, self._kernels) for each in module.parameters()):
                self._place(module, OF_CHUNK, attention.attend)

    def _place_products(self, module: Any) -> None:
        is_linear = isinstance(module, PackedLinear)
        if is_linear and module.weight.dtype is torch.bfloat16:
            shape = shape_of(module, ProductWay.PAIRS)
            self._place(module, OF_FEW, partial(multiply_few, self._kernels, shape))
        way = quickest_way(self._kernels, (module.weight if is_linear else module.down[0]).dtype)
        if way is None:
            return
        if is_linear:
            self._place(module, OF_MANY, partial(self._multiply, shape_of(module, way)))
            return
        shapes = {id(each): matrix_shape(each, None, way) for each in (*module.gate_up, *module.down)}
        self._place(module, OF_MANY, lambda inputs, weight: self._multiply(shapes[id(weight)], inputs))

    def _multiply(self, shape: MatrixShape, inputs: torch.Tensor) -> torch.Tensor | None:
        return multiply(self._kernels, self._room, shape, inputs)

    def _place(self, module: nn.Module, name: str, call: Callable[..., torch.Tensor | None]) -> None:
        setattr(module, name, partial(self._guarded, call))
        self._placed.append((module, name))

    def _guarded(self, call: Callable[..., torch.Tensor | None], *arguments: Any) -> torch.Tensor | None:
        if not self.is_on:
            return None
        try:
            return call(*arguments)
        except BaseException:
            self.failed = True
            raise


def has_products(module: nn.Module) -> bool:
    """Whether a module's weights are of the kernel's form."""
    if isinstance(module, PackedLinear):
        return module.in_columns and module.in_features % IN_STEP == 0
    return isinstance(module, LaidOutExperts) and module.in_columns and module.hidden % IN_STEP == 0


def shape_of(linear: PackedLinear, way: ProductWay) -> MatrixShape:
    """What its product is told; who has it holds the module's tensors."""
    bias: torch.Tensor | None = linear._parameters["bias"]
    return matrix_shape(linear.weight, bias, way)


def attends(module: nn.Module) -> bool:
    """Whether it is attention that looks for a kernel: of a quick layer, or in 16 bits, of transformers' functions."""
    if not hasattr(module, "num_key_value_groups") or not getattr(module, "is_causal", False):
        return False
    dtypes = {torch.bfloat16, torch.float32} if isinstance(module, QuickAttention) else {torch.bfloat16}
    return all(each.dtype in dtypes and each.device.type == "cpu" for each in module.parameters())


def may_have_chunks(layers: Iterable[nn.Module]) -> bool:
    """Whether :class:`NativeChunks` may find any."""
    modules = (module for layer in layers for module in layer.modules())
    return any(has_products(module) or attends(module) for module in modules)
