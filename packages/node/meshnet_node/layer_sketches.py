"""Sketches of all layers of a shard, by looking at how its model calls them in two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import DynamicCache

from meshnet_core.errors import UnsupportedModelError
from meshnet_node.layer_call import LayerCall
from meshnet_node.layer_sketch import LayerSketch
from meshnet_node.layer_tree import InPlaceOf, LayerTree
from meshnet_node.step_frames import CompilableShard, StepFrames


def sketch_layers(shard: CompilableShard, stopped: Callable[[], bool]) -> list[LayerSketch]:
    """One sketch for each layer; takes the shard's turn for three frames of one position.

    Raises:
        UnsupportedModelError: a step of this family cannot be compiled, with the reason.
        StoppedError: ``stopped`` said so.
    """
    view = shard.whole_view()
    empty = view.new_cache()
    if type(empty) is not DynamicCache:
        raise UnsupportedModelError(f"{shard.model_type} has a cache of a kind of its own")
    if "chunked_attention" in (getattr(view.config, "layer_types", None) or ()):
        raise UnsupportedModelError(f"{shard.model_type} attends to chunks, which a step needs masks for")
    noting = [_NotingLayer(layer) for layer in view.plain_layers]
    frames = StepFrames(shard, 3, stopped=stopped, tree=LayerTree(view.model, noting))
    frames.steps(3)
    for layer in noting:
        second, third = layer.noted
        if not second.like(third):
            raise UnsupportedModelError(
                f"a step of {shard.model_type} has shapes that grow with the positions before it"
            )
    return [
        LayerSketch.of(layer.plain, layer.noted[-1], slot, filled)
        for layer, slot, filled in zip(noting, empty.layers, frames.cache.layers, strict=True)
    ]


class _NotingLayer(InPlaceOf):
    """Runs the layer that stood here, and notes how it was called."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.noted: list[LayerCall] = []

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """As the layer that stood here."""
        self.noted.append(LayerCall.of(arguments, keywords))
        return self.plain(*arguments, **keywords)

    __call__ = forward
