"""A decoder layer without its weights: all that compiling it needs, and what makes two layers of one kind.

    layer                      sketch
    q_proj    PackedLinear     step_call 0          products of packed weights and experts are called, not compiled
    norm      [576]            [576], no memory     what is left are inputs, so that one library does for all layers

Knows nothing of files or processes.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from meshnet_node.layer_call import LayerCall
from meshnet_node.native_chunks import KERNEL_PLACES
from meshnet_node.packed_linear import PackedLinear
from meshnet_node.quantised_layers import QuantisedLinear
from meshnet_node.step_ops import AS_GIVEN

_PER_SHARD = frozenset(
    {"num_hidden_layers", "layer_types", "mlp_layer_types", "layers_block_type", "_name_or_path", "architectures"}
)
"""Parts of a config that say which layers a view has, and nothing of any one of them."""

_OF_ANY_MODULE = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that tell nothing of a module: its parts, which are told of by themselves, and hooks."""

STATES = ("conv_states", "recurrent_states")

Shape = tuple[tuple[int, ...], torch.dtype]
Place = tuple[str, int]
"""One of :data:`STATES`, and which of several."""


class Called(nn.Module):
    """Stands in for a module that is called from compiled code."""

    def __init__(self, index: int, width: int) -> None:
        super().__init__()
        self.index, self.width = index, width

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """See :mod:`meshnet_node.step_ops`."""
        result: torch.Tensor = torch.ops.meshnet.step_call(list(inputs), self.index, self.width)
        return result


@dataclass(frozen=True)
class LayerSketch:
    """One layer.

    Attributes:
        layer: a copy whose weights take no memory and whose packed products are :class:`Called`.
        weights: names of its parameters and buffers, with shapes and dtypes: the compiled layer's first inputs.
        called: names of the modules that are called, by number.
        call: how the model calls it for one position; its tensors are the inputs after the weights.
        slot: an empty cache slot of its kind.
        places: of a filled one, where its states are.
        states: what is there: the last inputs.
        device: of all of them.
    """

    layer: nn.Module
    weights: tuple[tuple[str, Shape], ...]
    called: tuple[str, ...]
    call: LayerCall
    slot: Any
    places: tuple[Place, ...]
    states: tuple[Shape, ...]
    device: torch.device

    @classmethod
    def of(cls, layer: nn.Module, call: LayerCall, empty_slot: Any, filled_slot: Any) -> LayerSketch:
        """Sketch ``layer``, which was called by ``call`` and left ``filled_slot``."""
        memo: dict[int, Any] = {}
        called: list[str] = []
        for name, module in layer.named_modules():
            if _is_called(module):
                memo[id(module)] = Called(len(called), getattr(module, "out_features", AS_GIVEN))
                called.append(name)
        weights = {name: each for name, each in _tensors(layer) if not any(name.startswith(f"{m}.") for m in called)}
        for tensor in weights.values():
            bare = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(bare, requires_grad=False) if is_parameter else bare
        for module in layer.modules():  # a view's kernels lead to addresses of its own
            memo |= {id(vars(module)[name]): None for name in KERNEL_PLACES if name in vars(module)}
        shell: Any = copy.copy(layer)
        shell._forward_pre_hooks = OrderedDict()  # they belong to the view, and lead to all of the model
        if "before" in vars(shell):
            shell.before = None  # likewise
        sketched = copy.deepcopy(shell, memo)
        each: Any
        for each in sketched.modules():
            for name in KERNEL_PLACES:
                vars(each).pop(name, None)
            if isinstance(getattr(each, "layer_idx", None), int):
                each.layer_idx = 0
        return cls(
            layer=sketched,
            weights=tuple((name, (tuple(each.shape), each.dtype)) for name, each in weights.items()),
            called=tuple(called),
            call=LayerCall(call.form, tuple(torch.zeros_like(each, device="cpu") for each in call.tensors)),
            slot=empty_slot,
            places=tuple(places := places_of(filled_slot)),
            states=tuple((tuple(each.shape), each.dtype) for each in states_of(filled_slot, places)),
            device=call.tensors[0].device,
        )

    @property
    def kind(self) -> str:
        """A hash of all that goes into compiling it: layers of one kind share a library."""
        about = {
            "modules": {name: _about(module) for name, module in self.layer.named_modules()},
            "configs": sorted({_config_text(module) for module in self.layer.modules()}),
            "weights": [f"{name} {shape} {dtype}" for name, (shape, dtype) in self.weights],
            "call": repr(self.call.form),
            "inputs": [f"{tuple(each.shape)} {each.dtype}" for each in self.call.tensors],
            "slot": type(self.slot).__name__,
            "states": repr((self.places, self.states)),
            "device": self.device.type,
        }
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def places_of(slot: Any) -> list[Place]:
    """Where a cache slot holds what a layer reads and replaces, all but keys and values."""
    return [(name, at) for name in STATES for at, each in getattr(slot, name, {}).items() if each is not None]


def states_of(slot: Any, places: Sequence[Place]) -> list[torch.Tensor]:
    """What ``slot`` holds there."""
    return [getattr(slot, name)[at] for name, at in places]


def weights_of(layer: nn.Module, sketch: LayerSketch) -> list[torch.Tensor]:
    """The compiled layer's first inputs, for a layer of the sketch's kind."""
    held = dict(_tensors(layer))
    return [held[name].detach() for name, _ in sketch.weights]


def _tensors(layer: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from layer.named_parameters()
    yield from layer.named_buffers()


def _is_called(module: nn.Module) -> bool:
    """Products of packed weights, which torch cannot compile, and experts, which are chosen by what is computed."""
    return isinstance(module, PackedLinear | QuantisedLinear) or type(module).__name__.endswith("Experts")


def _about(module: nn.Module) -> list[str]:
    plain = {name: _plain(value) for name, value in vars(module).items() if name not in _OF_ANY_MODULE}
    return [f"{type(module).__module__}.{type(module).__qualname__}", repr(sorted(plain.items()))]


def _plain(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    if isinstance(value, tuple | list):
        return str([_plain(each) for each in value])
    return getattr(value, "__qualname__", type(value).__qualname__)


def _config_text(module: nn.Module) -> str:
    config = getattr(module, "config", None)
    if not isinstance(config, PreTrainedConfig):
        return ""
    told = {name: value for name, value in config.to_dict().items() if name not in _PER_SHARD}
    return json.dumps(told, sort_keys=True, default=repr)
