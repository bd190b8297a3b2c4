"""What single families need beyond the general recipe of :mod:`meshnet_node.layer_slicing`: a few lines for each.

Two kinds. *Adapters* correct a view of some layers where transformers computes per-layer facts from absolute numbers,
or keeps state in a cache class of its own. *Bonds* tell which neighbouring layers cannot go to different hops, because
more than the hidden states passes between them. Knows nothing of files, frames or sessions.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from meshnet_core.layer_range import LayerRange


def adapt_bamba(model: PreTrainedModel, layers: LayerRange) -> None:
    """Which layers are attention is a property of the config, computed from a list of absolute numbers."""
    config: Any = model.config
    config.attn_layer_indices = [index - layers.start for index in config.attn_layer_indices or () if index in layers]


def adapt_jamba(model: PreTrainedModel, layers: LayerRange) -> None:
    """Every so-manieth layer is attention, and holds experts, counted from an offset: the offsets move instead."""
    config: Any = model.config
    config.attn_layer_offset = (config.attn_layer_offset - layers.start) % config.attn_layer_period
    config.expert_layer_offset = (config.expert_layer_offset - layers.start) % config.expert_layer_period


def adapt_gemma4(model: PreTrainedModel, layers: LayerRange) -> None:
    """The layers that reuse K/V are counted from the end, and those of unlike head sizes are listed by number.

    :func:`bond_of_gemma4` keeps all that reuse K/V in one shard with their sources, at the model's end.
    """
    config: Any = model.config
    base: Any = model.base_model
    sharers = range(base.first_kv_shared_layer_idx, base.first_kv_shared_layer_idx + config.num_kv_shared_layers)
    config.num_kv_shared_layers = sum(index in layers for index in sharers)
    # From here on the model would run only the positions to be projected, which fails without per-layer embeddings.
    base.first_kv_shared_layer_idx = -1
    if config.is_heterogeneous:
        spec = config._heterogeneity_spec
        spec.per_layer_overrides = {
            index - layers.start: given for index, given in spec.per_layer_overrides.items() if index in layers
        }


def minimax_cache(config: PreTrainedConfig) -> DynamicCache:
    """MiniMax insists on a cache class of its own; here with a slot for each layer of the view from the start.

    As it comes, slots appear as layers first write, and masks are made for the length of the first slot: in a view that
    begins with a linear layer that is always 0.
    """
    # Imported when needed, since it takes a good half second.
    module: Any = import_module("transformers.models.minimax.modeling_minimax")
    cache: DynamicCache = module.MiniMaxCache()
    cache.layers = DynamicCache(config=config).layers
    cache.linear_cache = [None] * config.num_hidden_layers  # type: ignore[attr-defined] # one state for each linear layer
    return cache


def bond_of_zamba2(_config: PreTrainedConfig, _cut: int) -> str:
    """A reason at every cut."""
    return "its later layers need the original embeddings besides the hidden states, and frames carry one tensor"


def bond_of_gemma3n(_config: PreTrainedConfig, _cut: int) -> str:
    """A reason at every cut."""
    return "several streams pass from layer to layer, and embeddings of each layer's own; frames carry one tensor"


def bond_of_gemma4(config: PreTrainedConfig, cut: int) -> str:
    """A reason at the cuts between a layer that reuses K/V and its source; at every cut if layers see the token ids."""
    given: Any = config
    if given.hidden_size_per_layer_input:
        return "each of its layers takes an embedding of the token ids of its own, and frames carry one tensor"
    modes = given.kv_sharing_modes
    for sharer, mode in enumerate(modes):
        if mode == "reuse":
            kind = given.layer_types[sharer]
            source = next(at for at in range(sharer) if modes[at] == "store" and given.layer_types[at] == kind)
            if source < cut <= sharer:
                return f"layer {sharer} uses the keys and values of layer {source}, so they must stay together"
    return ""
