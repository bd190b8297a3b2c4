"""A view's decode step through compiled layers: the model's own tree, with other modules where its layers are.

Each takes the place of one layer for frames of a single position on a filled cache. What the family's model does around
its layers stays its own. Knows nothing of how layers were compiled, nor of whether they are right.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from meshnet_core.errors import HopFailedError, UnsupportedModelError
from meshnet_node.layer_call import LayerCall
from meshnet_node.layer_sketch import LayerSketch, states_of, weights_of
from meshnet_node.layer_tree import InPlaceOf, LayerTree, cache_in
from meshnet_node.layer_view import LayerView
from meshnet_node.step_ops import Attend, running

LayerFunction = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""A compiled layer: weights, inputs and states to hidden states and new states."""


@dataclass(frozen=True, slots=True)
class CompiledLayer:
    """What all layers of a kind share.

    Attributes:
        sketch: of the kind.
        function: runs it.
        attention: the module that attends, and its options (:func:`~meshnet_node.step_export.compile_layer`); None
            where none does.
        beside: how many Nones it gives in a tuple behind the hidden states; None if it gives no tuple.
    """

    sketch: LayerSketch
    function: LayerFunction
    attention: dict[str, Any] | None
    beside: int | None = None


def load_compiled(sketch: LayerSketch, package: Path, about: Path) -> CompiledLayer:
    """Read what :mod:`meshnet_node.step_compiler` wrote."""
    device = sketch.device
    index = (device.index or 0) if device.type == "cuda" else -1
    # torch's own wrapper of this imports the whole compiler into the process that serves.
    loader = torch._C._aoti.AOTIModelPackageLoader(str(package), "model", True, 1, index)
    return CompiledLayer(sketch, loader.run, **json.loads(about.read_text("utf-8")))


class CompiledStep(LayerTree):
    """All layers of a view, compiled; for frames that :meth:`takes`.

    Args:
        view: whose step this is; its modules are shared.
        layers: one for each of the view's.
        look: called before each layer; may raise.
    """

    def __init__(self, view: LayerView, layers: Sequence[CompiledLayer], look: Callable[[], None]) -> None:
        steps = [
            _StepLayer(number, layer, compiled, look)
            for number, (layer, compiled) in enumerate(zip(view.plain_layers, layers, strict=True))
        ]
        self._stateful = [layer for layer in steps if layer.has_states]
        super().__init__(view.model, steps)

    def takes(self, cache: DynamicCache) -> bool:
        """Whether a single position on ``cache`` can be run; not while a slot records what it may fall back to."""
        return all(layer.takes(cache.layers[layer.number]) for layer in self._stateful)


class _StepLayer(InPlaceOf):
    def __init__(self, number: int, layer: nn.Module, compiled: CompiledLayer, look: Callable[[], None]) -> None:
        super().__init__(layer)
        sketch = compiled.sketch
        self.number = number
        self._look = look
        self._form = sketch.call
        self._places = sketch.places
        self._beside = compiled.beside
        self._function = compiled.function
        self._weights = weights_of(layer, sketch)
        # In a tuple: they are no children, the view's own layer has them.
        self._called = tuple(layer.get_submodule(name) for name in sketch.called)
        self._attention = None if compiled.attention is None else _attention(layer, compiled.attention)

    @property
    def has_states(self) -> bool:
        return bool(self._places)

    def takes(self, slot: Any) -> bool:
        return not slot.record_past and all(slot.has_previous_state.values())

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """As the layer that stood here."""
        self._look()
        slot = cache_in(arguments, keywords).layers[self.number]
        if getattr(slot, "is_sliding", False) and keywords.get("attention_mask") is not None:
            keywords["attention_mask"] = None  # a newest position may see all that a window's slot gives
        call = LayerCall.of(arguments, keywords)
        if call.form != self._form.form:
            raise HopFailedError(f"layer {self.number} was called in another way than the one it was compiled for")
        states = states_of(slot, self._places)
        attend = None if self._attention is None else self._attention(slot)
        with running(self._called, attend):
            hidden, *after = self._function([*self._weights, *call.tensors, *states])
        for (name, at), state in zip(self._places, after, strict=True):
            getattr(slot, name)[at] = state
        return hidden if self._beside is None else (hidden, *[None] * self._beside)

    __call__ = forward  # nobody hangs hooks on it


def _attention(layer: nn.Module, about: dict[str, Any]) -> Callable[[Any], Attend]:
    """What attends over a slot as the plain layer does: its module's own function, with the options it gives."""
    module: Any = layer.get_submodule(about["module"])
    options = {
        name: getattr(module, each["parameter"]) if isinstance(each, dict) else each
        for name, each in about["options"].items()
    }
    name = module.config._attn_implementation
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function = own if name == "eager" else ALL_ATTENTION_FUNCTIONS.get(name)
    if function is None:
        raise UnsupportedModelError(f"its attention {name!r} is of a kind that compiled layers cannot call")

    def over(slot: Any) -> Attend:
        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys, values = slot.update(key, value)
            result: torch.Tensor = function(module, query, keys, values, None, **options)[0]
            return result.contiguous()

        return attend

    return over
