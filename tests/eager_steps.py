"""In the place of a compiler: layers that run as they were traced, with no library made of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from meshnet_node.compiled_step import CompiledLayer, LayerFunction
from meshnet_node.layer_sketch import LayerSketch
from meshnet_node.step_export import TracedLayer

_TRACING = threading.Lock()  # one layer is traced at a time, as in the compiler's own process: nodes here have threads


def trace_layers(sketches: Sequence[LayerSketch], stopped: Callable[[], bool]) -> list[CompiledLayer]:
    """As `meshnet_node.step_compiler.compile_in_child`."""
    del stopped
    return [_traced(sketch) for sketch in sketches]


def spoilt_layers(by: float) -> Callable[[Sequence[LayerSketch], Callable[[], bool]], list[CompiledLayer]]:
    """Likewise, with hidden states that are `by` times too long, as a wrong compiler would have it."""

    def compile_layers(sketches: Sequence[LayerSketch], stopped: Callable[[], bool]) -> list[CompiledLayer]:
        return [replace(layer, function=_spoilt(layer.function, by)) for layer in trace_layers(sketches, stopped)]

    return compile_layers


def _traced(sketch: LayerSketch) -> CompiledLayer:
    layer = TracedLayer(sketch)
    attention, beside = layer.attention, layer.beside

    def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        with _TRACING:
            return list(layer(*tensors))

    return CompiledLayer(sketch, run, attention, beside)


def _spoilt(function: LayerFunction, by: float) -> LayerFunction:
    def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        hidden, *states = function(tensors)
        return [hidden * by, *states]

    return run
