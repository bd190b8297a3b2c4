"""A model's tree with other modules where its layers are; all else is shared with it. Knows no frames."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import DynamicCache, PreTrainedModel

from meshnet_node.layer_slicing import base_of


class InPlaceOf(nn.Module):
    """A module that stands where ``layer`` stood, and has what a model reads of it besides calling it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._plain = (layer,)  # in a tuple: it is no child, the model's own tree has it

    @property
    def plain(self) -> nn.Module:
        """What stood here."""
        return self._plain[0]

    def __getattr__(self, name: str) -> Any:
        """What a model reads of its layers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_plain"][0], name)


class LayerTree:
    """``model`` with ``layers`` in place of its own.

    Attributes:
        model, base: shallow copies of the model and of its base, which has the layers.
        layers: in order.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
        self.layers = tuple(layers)
        self.model, self.base = _with_layers(model, base_of(model), nn.ModuleList(layers))

    def takes(self, cache: DynamicCache) -> bool:
        """Whether it can run a single position on ``cache``."""
        del cache
        return True


def cache_in(arguments: Sequence[Any], keywords: dict[str, Any]) -> DynamicCache:
    """The cache that a layer is called with."""
    return next(each for each in (*keywords.values(), *arguments) if isinstance(each, DynamicCache))


def _with_layers(model: PreTrainedModel, base: Any, layers: nn.ModuleList) -> tuple[Any, Any]:
    other = _shallow(base)
    other._modules["layers"] = layers
    if base is model:
        return other, other
    (path,) = [name for name, module in model.named_modules() if module is base]
    top = above = _shallow(model)
    *between, last = path.split(".")
    for name in between:
        above._modules[name] = _shallow(above._modules[name])
        above = above._modules[name]
    above._modules[last] = other
    return top, other


def _shallow(module: Any) -> Any:
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied
