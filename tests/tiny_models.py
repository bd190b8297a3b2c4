"""Tiny random checkpoints of each supported family, saved as Hugging Face folders.

Weights are drawn wide, so that logits are sensitive and a wrong state shows; layer patterns are chosen so that the
kinds of a hybrid model fall into different shards; sliding windows are shorter than the sequences of the tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "norm_topk_prob": True,
}
_DELTA: dict[str, Any] = {
    "initializer_range": 0.1,  # their chunked and stepwise kernels round apart, more so with wide weights
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_LINEAR, _FULL, _SLIDING, _CONV = "linear_attention", "full_attention", "sliding_attention", "conv"

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 4},
    "qwen2": {"num_hidden_layers": 4, "tie_word_embeddings": True},
    "qwen3": {"num_hidden_layers": 4},
    "mistral": {"num_hidden_layers": 4, "sliding_window": 11},
    "gemma3_text": {
        "num_hidden_layers": 5,
        "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL],
        "sliding_window": 11,
        "query_pre_attn_scalar": 8,
        "tie_word_embeddings": True,
    },
    "lfm2": {"num_hidden_layers": 5, "layer_types": [_CONV, _CONV, _FULL, _CONV, _FULL], "conv_L_cache": 3},
    "qwen3_moe": {"num_hidden_layers": 4, **_MOE, "mlp_only_layers": [1]},
    "qwen3_next": {"num_hidden_layers": 5, "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR, _FULL], **_MOE, **_DELTA},
    "qwen3_5_text": {"num_hidden_layers": 5, "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR, _FULL], **_DELTA},
    "qwen3_5_moe_text": {
        "num_hidden_layers": 5,
        "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR, _FULL],
        **_MOE,
        **_DELTA,
    },
}
"""Family -> what its config has besides the common part."""


def num_layers(family: str) -> int:
    """Layers of the tiny model of ``family``."""
    return int(FAMILIES[family]["num_hidden_layers"])


def save_tiny(family: str, folder: Path, *, seed: int = 0, max_shard_size: str = "50GB", **overrides: Any) -> Path:
    """Draw the tiny model of ``family`` in float32 and save it in ``folder``; ``overrides`` go over its config."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**_COMMON, **FAMILIES[family], **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)  # else a skipped norm weight would not show
    model.eval()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
