"""Parts of layers whose work in a step is C code, each in its module's place: gated delta rules, and experts.

Knows which modules have one, and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch import nn

from meshnet_node.kernel_library import StepKernels
from meshnet_node.native_delta import NativeDelta
from meshnet_node.native_experts import NativeExperts
from meshnet_node.packed_experts import is_packable


class NativePart(Protocol):
    """What stands in a module's place.

    Attributes:
        is_on: whether steps are for it; else, and for all else, the module runs by itself.
    """

    is_on: bool

    def leave(self) -> None:
        """Let the module run by itself for good."""
        ...


class NativeParts:
    """Of some layers. Not for two threads at once.

    Args:
        layers: that are looked through.
        kernels: this machine's.

    Attributes:
        apart: indices of layers that take each session's own slot.
    """

    def __init__(self, layers: Iterable[nn.Module], kernels: StepKernels) -> None:
        deltas = [NativeDelta(module, kernels) for module in _modules(layers) if NativeDelta.can_run(module)]
        experts = [NativeExperts(module, kernels) for module in _modules(layers) if NativeExperts.can_run(module)]
        self._parts: list[NativePart] = [*deltas, *experts]
        self.apart = frozenset(delta.index for delta in deltas)

    def __len__(self) -> int:
        return len(self._parts)

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
    return any(NativeDelta.can_run(module) or NativeExperts.can_run(module) for module in _modules(layers))


def may_have_parts_once_loaded(layers: Iterable[nn.Module]) -> bool:
    """Whether to expect that of layers without weights; no promise."""
    return any(hasattr(module, "A_log") or is_packable(module) for module in _modules(layers))


def _modules(layers: Iterable[nn.Module]) -> Iterator[Any]:
    for layer in layers:
        yield from layer.modules()
