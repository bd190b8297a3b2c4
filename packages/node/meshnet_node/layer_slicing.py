"""Cutting a transformers model down to a range of its layers, in place or as a view.

*Pruning* takes a model built on the meta device and removes what a shard does not run, keeping the remaining names, so
that checkpoint names and weight conversions still match. A *view* is a copy of the module tree for one hop's range that
shares every parameter and has its layers numbered from 0, with a config that describes just those layers:

    model       0 1 2 3 4 5 6 7
    shard           [2 3 4 5]        pruned: keys "2".."5", absolute numbers, the model's own config
    view at 4           [0 1]        layers 4 and 5 again, numbered 0 and 1, config of two layers, cache of two layers

Caches and masks are built from the view's config. One that described the shard would look right and be wrong: with an
effective start inside it, transformers asks the untouched first layer how long the sequence is. This module knows
nothing of sessions, frames or files.
"""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from meshnet_core.layer_range import LayerRange
from meshnet_node.family_support import Family

_PER_LAYER_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type")


def base_of(model: PreTrainedModel) -> Any:
    """The module of a causal model that has the layers; llama4's says that it is the causal model itself."""
    base: Any = model.base_model
    return base.model if base is model else base


def prune(model: PreTrainedModel, layers: LayerRange, family: Family) -> None:
    """Remove from ``model`` (on the meta device) all that a shard of ``layers`` does not run.

    A tail of a model with tied embeddings keeps the embedding matrix, as its output projection.
    """
    base = base_of(model)
    total = model.config.num_hidden_layers
    for index in range(total):
        if index not in layers:
            del base.layers._modules[str(index)]
    is_last = layers.stop == total
    if not is_last:
        setattr(base, family.final_norm, nn.Identity())
        model.lm_head = nn.Identity()
        model.all_tied_weights_keys = {}
    if layers.start > 0 and not (is_last and model.all_tied_weights_keys):
        base.set_input_embeddings(nn.Identity())


def sliced(shard: PreTrainedModel, held: LayerRange, wanted: LayerRange) -> PreTrainedModel:
    """A view's model: a copy of the module tree that shares every parameter.

    Args:
        shard: pruned to ``held``; stays as it is.
        wanted: from an effective start to the shard's end.
    """
    model = _copy_sharing_parameters(shard)
    _renumber(model, held, wanted)
    _slice_config(model.config, wanted)
    return model


def _copy_sharing_parameters(model: PreTrainedModel) -> PreTrainedModel:
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    # deepcopy takes what the memo holds instead of copying it; the config is copied once and stays shared by modules
    return copy.deepcopy(model, shared)


def _renumber(model: PreTrainedModel, held: LayerRange, wanted: LayerRange) -> None:
    base = base_of(model)
    kept = [base.layers._modules[str(index)] for index in range(wanted.start, held.stop)]
    for local, layer in enumerate(kept):
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = local
    base.layers = nn.ModuleList(kept)
    if wanted.start > 0 and hasattr(base, "embedding_multiplier"):
        base.embedding_multiplier = 1.0  # these scale whatever comes in; what comes in here was scaled by the first hop


def _slice_config(config: PreTrainedConfig, layers: LayerRange) -> None:
    total = config.num_hidden_layers
    if len(layers) == total:
        return
    config.num_hidden_layers = len(layers)
    for name in _PER_LAYER_LISTS:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and len(value) == total:
            setattr(config, name, list(value[layers.start : layers.stop]))
