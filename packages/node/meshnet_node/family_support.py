"""Which model families a shard may serve, and why the others may not be.

One registry, keyed by transformers' ``model_type``: a family is here because the parity tests cover it at every split
point, or it is refused, by name and with its reason where that is known. A split of a family that can be cut at some
layers only is refused with the nearest one that works. To add a family: put it in ``FAMILIES`` and in
``tests/tiny_models.py``; the tests then tell, and ``docs/families.md`` is made anew (see there). Knows configs only: no
weights, no tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, DynamicCache, PreTrainedConfig, PreTrainedModel

from meshnet_core.errors import UnsupportedModelError
from meshnet_core.layer_range import LayerRange
from meshnet_node import family_adapters as adapters
from meshnet_node.config_json import settings_of

Bond = Callable[[PreTrainedConfig, int], str]
"""(text config, cut) -> why layers ``cut - 1`` and ``cut`` cannot be on different hops; empty where they can."""


def no_bond(_config: PreTrainedConfig, _cut: int) -> str:
    """For families that may be cut anywhere."""
    return ""


def no_change(_model: PreTrainedModel, _layers: LayerRange) -> None:
    """For families that need no adapter."""


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between families, as far as cutting them in pieces is concerned.

    Attributes:
        model_type: transformers' name.
        takes_masks: the base model's forward takes a ready dict from layer type to mask as ``attention_mask``. Hops
            without any attention layer need that: left to itself the model would ask the cache for a length.
        final_norm: attribute of the base model that holds the norm after the last layer.
        bond: tells where the model cannot be cut.
        adapt: corrects a view's model and config in place, given its absolute range; see
            :mod:`meshnet_node.family_adapters`.
        new_cache: makes the cache object from a view's config.
        steps_only: a frame of several positions on a filled cache would begin its recurrent layers at zero again, so
            such a frame runs position by position.
        reads_weights: attributes of linear modules whose weights the model's own code reads; they stay as they are.
        runs_together: newest positions of several sessions may run in one forward, each on state of its own. The tests
            run every family so, alone and together.
        quick: its decoder layers and the loop over them are Llama's, so that :mod:`meshnet_node.quick_layer` may stand
            for them: norms of the same rounding, rope over whole heads, perhaps norms of heads before it, and anything
            in the place of the MLP. The tests compare each with transformers' own, bit for bit.
        note: for people who choose a model; goes into ``docs/families.md``.
    """

    model_type: str
    takes_masks: bool = False
    final_norm: str = "norm"
    bond: Bond = no_bond
    adapt: Callable[[PreTrainedModel, LayerRange], None] = no_change
    new_cache: Callable[[PreTrainedConfig], DynamicCache] = lambda config: DynamicCache(config=config)
    steps_only: bool = False
    reads_weights: frozenset[str] = frozenset()
    runs_together: bool = True
    quick: bool = False
    note: str = ""


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("bamba", takes_masks=True, final_norm="final_layernorm", adapt=adapters.adapt_bamba),
        Family("cohere"),
        Family("cohere2", takes_masks=True),
        Family("deepseek_v3", runs_together=False),  # expands keys and values from what its cache gives
        Family("ernie4_5"),
        Family("exaone4", takes_masks=True),
        Family("falcon_h1", final_norm="final_layernorm"),
        Family("gemma"),
        Family("gemma2", takes_masks=True),
        Family("gemma3_text", takes_masks=True),
        Family("gemma3n_text", takes_masks=True, bond=adapters.bond_of_gemma3n),
        Family(
            "gemma4_text",
            takes_masks=True,
            bond=adapters.bond_of_gemma4,
            adapt=adapters.adapt_gemma4,
            note="A checkpoint whose layers share K/V: not between a layer and the one whose K/V it uses. One with "
            "per-layer embeddings: only whole.",
        ),
        Family("glm"),
        Family("glm4"),
        Family("glm4_moe"),
        Family("gpt_oss", takes_masks=True),
        Family("granite"),
        Family("granitemoe"),
        Family("granitemoehybrid", takes_masks=True),
        Family("hunyuan_v1_dense"),
        Family(
            "jamba",
            takes_masks=True,
            final_norm="final_layernorm",
            adapt=adapters.adapt_jamba,
            steps_only=True,
            reads_weights=frozenset({"dt_proj"}),
            note="Chunks of a prompt after the first run position by position.",
        ),
        Family("kimi_linear", takes_masks=True, runs_together=False),  # as deepseek_v3
        Family("lfm2", takes_masks=True, final_norm="embedding_norm"),
        Family("lfm2_moe", takes_masks=True, final_norm="embedding_norm"),
        Family("llama", quick=True),
        Family("llama4_text", takes_masks=True),
        Family("mamba2", final_norm="norm_f", note="Its state does not grow."),
        Family("minimax", takes_masks=True, new_cache=adapters.minimax_cache),
        Family("ministral", takes_masks=True, quick=True),
        Family("mistral", quick=True),
        Family("mixtral", quick=True),
        Family("nemotron_h", takes_masks=True, final_norm="norm_f"),
        Family("olmo2"),
        Family("olmo3", takes_masks=True),
        Family("olmo_hybrid", takes_masks=True),
        Family("phi3"),
        Family("qwen2", takes_masks=True, quick=True),
        Family("qwen2_moe", takes_masks=True, quick=True),
        Family("qwen3", takes_masks=True, quick=True),
        Family("qwen3_5_moe_text", takes_masks=True),
        Family("qwen3_5_text", takes_masks=True),
        Family("qwen3_moe", quick=True),
        Family("qwen3_next", takes_masks=True),
        Family("seed_oss", quick=True),
        Family("smollm3", takes_masks=True, quick=True),
        Family("starcoder2"),
        Family("zamba2", final_norm="final_layernorm", bond=adapters.bond_of_zamba2),
    )
}

TEXT_TOWERS: dict[str, str] = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Multimodal wrappers of which the text tower is served alone, and what that usually is."""

_MOVING_ROPES = {
    "dynamic": "whose frequencies depend on the longest sequence that any session ran before",
    "longrope": "whose frequencies change once a sequence passes a length, so that the keys held before go stale",
}

REASONS: dict[str, str] = {
    "gemma3n": "only its text tower alone is, as gemma3n_text",
    "recurrent_gemma": (
        "it keeps conv and recurrent states in its modules and not in the cache, so that sessions would overwrite each "
        "other's, and begins the convolution anew with every frame of several positions"
    ),
}
"""Families that would not work -> why."""


def text_config_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the language model in ``config``: itself, or a multimodal wrapper's text tower.

    Raises:
        UnsupportedModelError: by name and reason, if that is not a family of the registry.
    """
    if config.model_type in TEXT_TOWERS:
        config = config.get_text_config(decoder=True)
    if config.model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES | TEXT_TOWERS))
        reason = REASONS.get(config.model_type, "its parity when cut in pieces was never tested")
        raise UnsupportedModelError(f"{config.model_type} is not supported: {reason}; supported are {known}")
    return config


def family_of(config: PreTrainedConfig) -> Family:
    """The registry's entry for a text config, after checking the options that would break it when cut.

    Raises:
        UnsupportedModelError: by name and reason.
    """
    config = text_config_of(config)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            f"this {config.model_type} checkpoint is quantized; use its float version, or a GGUF file of it"
        )
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type", rope.get("type"))
        if kind in _MOVING_ROPES:
            raise UnsupportedModelError(
                f"this {config.model_type} checkpoint uses {kind} rope scaling, {_MOVING_ROPES[kind]}; "
                "use a checkpoint without it"
            )
    if getattr(config, "use_bidirectional_attention", False) not in {None, False, "vision"}:
        raise UnsupportedModelError(
            f"this {config.model_type} checkpoint attends in both directions: it embeds text and cannot generate it"
        )
    if config.model_type == "minimax" and config.sliding_window is not None:
        raise UnsupportedModelError("this minimax checkpoint has a sliding window, which no test covers")
    return FAMILIES[config.model_type]


def cuts_of(config: PreTrainedConfig) -> tuple[int, ...]:
    """Where a model may be cut: each is the first layer after the cut, of 1 to the last layer."""
    bond = family_of(config).bond
    return tuple(cut for cut in range(1, config.num_hidden_layers) if not bond(config, cut))


def check_split(config: PreTrainedConfig, layers: LayerRange) -> None:
    """Refuse a range whose edges lie where the model cannot be cut.

    Args:
        config: text config of the whole model.
        layers: of a shard, or of a hop.

    Raises:
        UnsupportedModelError: with the reason, and the nearest split that works.
    """
    bond = family_of(config).bond
    total = config.num_hidden_layers
    for cut in (layers.start, layers.stop):
        if 0 < cut < total and (reason := bond(config, cut)):
            cuts = cuts_of(config)
            if not cuts:
                advice = f"one node must hold all of it, layers 0-{total - 1}"
            else:
                near = min(cuts, key=lambda other: (abs(other - cut), other))
                advice = f"the nearest split that works is 0-{near - 1},{near}-{total - 1}"
            raise UnsupportedModelError(
                f"{config.model_type} cannot be cut between layers {cut - 1} and {cut}: {reason}; {advice}"
            )


def cuts_in(document: dict[str, Any]) -> tuple[int, ...]:
    """Where a model may be cut, by its parsed ``config.json``; see :func:`cuts_of`.

    Raises:
        UnsupportedModelError: as :func:`family_of`.
    """
    return cuts_of(config_of(document))


def config_of(document: dict[str, Any]) -> PreTrainedConfig:
    """The text config of a parsed ``config.json``, checked as :func:`family_of` does.

    Raises:
        UnsupportedModelError: by name and reason.
    """
    try:
        config = AutoConfig.for_model(document["model_type"], **settings_of(document))
    except Exception as error:  # a config class raises what it likes over a setting
        raise UnsupportedModelError(f"transformers cannot use this config.json: {error}") from error
    config = text_config_of(config)
    family_of(config)
    return config


def check_config(document: dict[str, Any], layers: LayerRange) -> None:
    """Refuse a model that cannot be served, or not in this range, by its parsed ``config.json``: before any download.

    Raises:
        UnsupportedModelError: as :func:`family_of` and :func:`check_split`.
    """
    check_split(config_of(document), layers)


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Every rope description in the config: one flat dict, or one for each layer type."""
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        value = getattr(config, name, None)
        if isinstance(value, dict):
            found += [value, *(entry for entry in value.values() if isinstance(entry, dict))]
    return found
