"""Compiling one decoder layer for one position into a library, from its sketch. Run in a process of its own.

The layer is traced with a stand-in for its cache: what it gives to the slot and to attention goes to
``step_attention`` instead, so the number of positions held is no shape of the compiled code, and nothing is compiled
again as it grows. States of a fixed size are inputs and outputs. Nothing of this touches a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, DynamicCache

from meshnet_core.errors import UnsupportedModelError
from meshnet_node.layer_sketch import LayerSketch, states_of

_TRACED = "meshnet_traced_step"
_NOT_FOR_ATTENTION = frozenset({"position_ids", "cache", "position_embeddings"})
"""What layers hand on with all else that they were given."""
CONFIGS: dict[str, object] = {
    "cpp.threads": 1,  # a position's few thousand elements; a second team of threads would spin against the products'
    "emulate_precision_casts": True,  # round where the plain layer rounds
}


class TracedLayer(nn.Module):
    """A layer as a function: weights, inputs and states in, hidden states and new states out.

    Attributes:
        attention: which module attends, and with what options, JSON-ready; None for a layer without attention.
        beside: how many Nones it gives in a tuple behind the hidden states; None if it gives no tuple.

    Raises:
        UnsupportedModelError: this layer cannot be compiled so, with the reason.
    """

    attention: dict[str, Any] | None
    beside: int | None

    def __init__(self, sketch: LayerSketch) -> None:
        super().__init__()
        self.__dict__["_sketch"] = sketch  # not as a child: its weights are inputs
        self._given: tuple[torch.Tensor, torch.Tensor] | None = None
        module: Any
        for module in sketch.layer.modules():
            if hasattr(getattr(module, "config", None), "_attn_implementation"):
                module.config._attn_implementation = _TRACED
        with torch.no_grad():
            self(*_bare(sketch, torch.device("meta")))  # shapes alone: tells what attends, and what cannot be

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See the class."""
        sketch: LayerSketch = self.__dict__["_sketch"]
        self._forget()
        names = [name for name, _ in sketch.weights]
        weights, rest = dict(zip(names, given, strict=False)), given[len(names) :]
        taken = len(sketch.call.tensors)
        slot = _filled(sketch, [each.clone() for each in rest[taken:]])
        if hasattr(slot, "keys"):
            slot.update = self._update
        cache = _TracedCache(self, sketch.layer)
        cache.layers = [slot]
        arguments, keywords = sketch.call.with_tensors(rest[:taken], cache)
        _TracedCache.current = cache
        output: Any = torch.func.functional_call(sketch.layer, weights, arguments, keywords)
        hidden, *beside = output if isinstance(output, tuple) else (output,)
        if not isinstance(hidden, torch.Tensor) or any(each is not None for each in beside):
            raise UnsupportedModelError("its layers give more than hidden states")
        self.beside = len(beside) if isinstance(output, tuple) else None
        if self._given is not None and self.attention is None:
            raise UnsupportedModelError("its attention is none that could be called by itself")
        return (hidden, *states_of(slot, sketch.places))

    def _forget(self) -> None:
        self._given = self.attention = None

    def _update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self._given is not None:
            raise UnsupportedModelError("its layers keep more than one set of keys and values")
        self._given = key, value
        return key, value

    def attend(
        self,
        name: str,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Attention of the module called ``name``."""
        if self._given is None or self.attention is not None:
            raise UnsupportedModelError("its attention does not take a single position's keys and values from one slot")
        if self._given[0] is not key or self._given[1] is not value:
            raise UnsupportedModelError("its attention computes keys or values from what the cache gives")
        told = {option: _told(option, each, module) for option, each in options.items()}
        self.attention = {
            "module": name,
            "options": {option: each for option, each in told.items() if each is not None},
        }
        result: torch.Tensor = torch.ops.meshnet.step_attention(query, key, value)
        return result


class _TracedCache(DynamicCache):
    """The cache of a layer that is traced; the attention function finds it here, since it is given none."""

    current: _TracedCache

    def __init__(self, traced: TracedLayer, layer: nn.Module) -> None:
        super().__init__()
        self.traced, self.layer = traced, layer


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    cache = _TracedCache.current
    (name,) = [name for name, each in cache.layer.named_modules() if each is module]
    if attention_mask is not None:
        raise UnsupportedModelError("its attention takes a mask for a single position")
    kept = {option: each for option, each in options.items() if option not in _NOT_FOR_ATTENTION}
    return cache.traced.attend(name, module, query, key, value, kept), None


AttentionInterface.register(_TRACED, _attend)


def compile_layer(sketch: LayerSketch, package: Path) -> TracedLayer:
    """Write the library of a layer to ``package``; the layer as it was traced.

    Raises:
        UnsupportedModelError: this layer cannot be compiled so, with the reason.
        Exception: whatever torch raises.
    """
    import torch._inductor  # noqa: PLC0415 - a second, and nobody but the child needs it

    traced = TracedLayer(sketch)
    with torch.no_grad():
        program = torch.export.export(traced, _bare(sketch, sketch.device), strict=False)
        torch._inductor.aoti_compile_and_package(program, package_path=str(package), inductor_configs=CONFIGS)
    return traced


def _bare(sketch: LayerSketch, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Tensors such as the layer takes; never written, those of weights take no memory of a machine."""
    weights = [torch.empty(shape, dtype=dtype, device=device) for _, (shape, dtype) in sketch.weights]
    states = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in sketch.states]
    return (*weights, *(each.to(device) for each in sketch.call.tensors), *states)


def _filled(sketch: LayerSketch, states: Sequence[torch.Tensor]) -> Any:
    """The slot, which is empty, made to look as one does after positions before, with ``states``."""
    slot = sketch.slot
    for (name, at), state in zip(sketch.places, states, strict=True):
        getattr(slot, name)[at] = state
        getattr(slot, f"is_{name}_initialized")[at] = True
    if sketch.places:
        slot.has_previous_state = dict.fromkeys(slot.has_previous_state, True)
    return slot


def _told(name: str, value: Any, module: nn.Module) -> Any:
    """An option of attention as JSON has it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    for own, tensor in module.named_parameters(recurse=False):
        if tensor is value:
            return {"parameter": own}
    raise UnsupportedModelError(f"its attention takes {name}, a {type(value).__name__} that is none of its parameters")
