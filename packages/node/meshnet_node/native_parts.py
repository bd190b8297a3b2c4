"""Parts of layers whose work is C code, each in its module's place: gated delta rules, and experts.

Knows which modules have one, and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import nn
from transformers import DynamicCache

from meshnet_node.kernel_library import StepKernels
from meshnet_node.native_delta import NativeDelta
from meshnet_node.native_experts import NativeExperts
from meshnet_node.packed_experts import is_packable


class NativePart(Protocol):
    """What stands in a module's place.

    Attributes:
        is_on: whether frames may be for it; else the module runs by itself.
        failed: whether one raised in it.
    """

    is_on: bool
    failed: bool

    def enter(self) -> None:
        """Stand there."""
        ...

    def leave(self) -> None:
        """Let the module run by itself for good."""
        ...


class NativeParts:
    """Of some layers, each in its place once all are made. Not for two threads at once.

    Args:
        layers: that are looked through.
        kernels: this machine's.

    Attributes:
        experts: those of them that are mixtures.
    """

    def __init__(self, layers: Iterable[nn.Module], kernels: StepKernels) -> None:
        modules: list[Any] = [module for layer in layers for module in layer.modules()]
        self._deltas = [NativeDelta(module, kernels) for module in modules if NativeDelta.can_run(module)]
        self.experts = [NativeExperts(module, kernels) for module in modules if NativeExperts.can_run(module)]
        self._parts: list[NativePart] = [*self._deltas, *self.experts]
        for part in self._parts:
            part.enter()

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def failed(self) -> bool:
        """Whether a frame raised in one of them."""
        return any(part.failed for part in self._parts)

    def apart(self, caches: Sequence[DynamicCache]) -> frozenset[int]:
        """Indices of the layers that take each session's own slot, where those suit them."""
        return frozenset(
            delta.index for delta in self._deltas if all(delta.takes(cache.layers[delta.index]) for cache in caches)
        )

    def turn(self, *, on: bool) -> None:
        """Whether what runs next may take them."""
        for part in self._parts:
            part.is_on = on

    def leave(self) -> None:
        """Let all modules run by themselves again."""
        for part in self._parts:
            part.leave()


def may_have_parts(layers: Iterable[nn.Module]) -> bool:
    """Whether :class:`NativeParts` would find any."""
    modules = (module for layer in layers for module in layer.modules())
    return any(NativeDelta.can_run(module) or NativeExperts.can_run(module) for module in modules)


def may_have_parts_once_loaded(layers: Iterable[nn.Module]) -> bool:
    """Whether to expect that of layers without weights; no promise."""
    modules = (module for layer in layers for module in layer.modules())
    return any(hasattr(module, "A_log") or is_packable(module) for module in modules)
