"""Which model families a shard may serve, and why the others may not be.

One registry, keyed by transformers' ``model_type``: a family is here because the parity tests cover it at every split
point, or it is refused, by name and with its reason where that is known. To add one: put it in ``FAMILIES`` and in
``tests/tiny_models.py``; the tests then tell. Knows configs only: no weights, no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from meshnet_core.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between families, as far as cutting them in pieces is concerned.

    Attributes:
        model_type: transformers' name.
        takes_masks: the base model's forward takes a ready dict from layer type to mask as ``attention_mask``. Hops
            without any attention layer need that: left to itself the model would ask the cache for a length.
        final_norm: attribute of the base model that holds the norm after the last layer.
    """

    model_type: str
    takes_masks: bool = False
    final_norm: str = "norm"


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("cohere"),
        Family("cohere2", takes_masks=True),
        Family("deepseek_v3"),
        Family("ernie4_5"),
        Family("exaone4", takes_masks=True),
        Family("falcon_h1", final_norm="final_layernorm"),
        Family("gemma"),
        Family("gemma2", takes_masks=True),
        Family("gemma3_text", takes_masks=True),
        Family("glm"),
        Family("glm4"),
        Family("glm4_moe"),
        Family("gpt_oss", takes_masks=True),
        Family("granite"),
        Family("granitemoe"),
        Family("granitemoehybrid", takes_masks=True),
        Family("hunyuan_v1_dense"),
        Family("lfm2", takes_masks=True, final_norm="embedding_norm"),
        Family("lfm2_moe", takes_masks=True, final_norm="embedding_norm"),
        Family("llama"),
        Family("ministral", takes_masks=True),
        Family("mistral"),
        Family("mixtral"),
        Family("nemotron_h", takes_masks=True, final_norm="norm_f"),
        Family("olmo2"),
        Family("olmo3", takes_masks=True),
        Family("olmo_hybrid", takes_masks=True),
        Family("phi3"),
        Family("qwen2", takes_masks=True),
        Family("qwen2_moe", takes_masks=True),
        Family("qwen3", takes_masks=True),
        Family("qwen3_5_moe_text", takes_masks=True),
        Family("qwen3_5_text", takes_masks=True),
        Family("qwen3_moe"),
        Family("qwen3_next", takes_masks=True),
        Family("seed_oss"),
        Family("smollm3", takes_masks=True),
        Family("starcoder2"),
    )
}

TEXT_TOWERS: dict[str, str] = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""Multimodal wrappers whose text tower transformers can load by itself, and what that tower is."""

_STREAMS = "more than one tensor passes from layer to layer, and frames carry one"
_COMPUTED_TYPES = "which layers are attention is computed from absolute indices, so a sliced config would be wrong"
_SHARED_KV = "layers share K/V with earlier layers, so a split may separate a sharer from its source"
_VISION = "it is a multimodal wrapper whose text tower cannot be loaded by itself"

_MOVING_ROPES = {
    "dynamic": "whose frequencies depend on the longest sequence that any session ran before",
    "longrope": "whose frequencies change once a sequence passes a length, so that the keys held before go stale",
}

REASONS: dict[str, str] = {
    "bamba": _COMPUTED_TYPES,
    "gemma3": _VISION,
    "gemma3n": _STREAMS,
    "gemma3n_text": _STREAMS,
    "gemma4": _SHARED_KV,
    "gemma4_text": _SHARED_KV,
    "jamba": _COMPUTED_TYPES,
    "llama4": "its layers lie one level deeper than the loader looks",
    "llama4_text": "its layers lie one level deeper than the loader looks",
    "minimax": "it needs a cache class of its own",
    "mistral3": _VISION,
    "recurrent_gemma": "cached and uncached logits differ by more than rounding",
    "zamba2": "later layers need the original embeddings besides the hidden states, and frames carry one tensor",
}


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
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError(
            f"this {config.model_type} checkpoint attends in both directions: it embeds text and cannot generate it"
        )
    return FAMILIES[config.model_type]


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Every rope description in the config: one flat dict, or one for each layer type."""
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        value = getattr(config, name, None)
        if isinstance(value, dict):
            found += [value, *(entry for entry in value.values() if isinstance(entry, dict))]
    return found
