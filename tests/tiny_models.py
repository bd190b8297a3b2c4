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

_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
_LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2}
_HYBRID = [_LINEAR, _LINEAR, _FULL, _LINEAR, _FULL]
_WINDOWED = [_SLIDING, _SLIDING, _FULL, _SLIDING]
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

CORE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {"sliding_window": 11},
    "gemma3_text": {
        "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL],
        "sliding_window": 11,
        "query_pre_attn_scalar": 8,
        "tie_word_embeddings": True,
    },
    "lfm2": {"layer_types": [_CONV, _CONV, _FULL, _CONV, _FULL], "conv_L_cache": 3},
    "qwen3_moe": {**_MOE, "mlp_only_layers": [1]},
    "qwen3_next": {"layer_types": _HYBRID, **_MOE, **_DELTA},
    "qwen3_5_text": {"layer_types": _HYBRID, **_DELTA},
    "qwen3_5_moe_text": {"layer_types": _HYBRID, **_MOE, **_DELTA},
}
"""The families that meshnet is made for -> what their tiny config has besides the common part."""

MORE: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [2, 4], "num_hidden_layers": 5},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0, "layer_types": _WINDOWED, "sliding_window": 11},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "ernie4_5": {},
    "exaone4": {"layer_types": _WINDOWED, "sliding_window": 11},
    "falcon_h1": {**_MAMBA, "mamba_n_heads": 4, "mamba_d_ssm": 32, "embedding_multiplier": 3.0},
    "gemma": {},
    "gemma2": {"layer_types": [_SLIDING, _FULL] * 2, "sliding_window": 11, "query_pre_attn_scalar": 8},
    "gemma4_text": {
        "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL],
        "sliding_window": 11,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 16,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "enable_moe_block": True,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "gpt_oss": {
        "layer_types": [_SLIDING, _FULL] * 2,
        "sliding_window": 11,
        "rope_parameters": _PLAIN_ROPE,
        **_LOCAL_EXPERTS,
    },
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "granitemoe": {"embedding_multiplier": 3.0, **_LOCAL_EXPERTS},
    "granitemoehybrid": {
        "layer_types": _HYBRID,
        "embedding_multiplier": 3.0,
        "shared_intermediate_size": 16,
        "position_embedding_type": "rope",
        **_MAMBA,
        **_LOCAL_EXPERTS,
    },
    "hunyuan_v1_dense": {},
    "jamba": {
        "num_hidden_layers": 5,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "kimi_linear": {
        "layer_types": _HYBRID,
        "n_group": 1,
        "topk_group": 1,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "lfm2_moe": {"layer_types": [_CONV, _CONV, _FULL, _CONV, _FULL], "conv_L_cache": 3, "num_dense_layers": 1, **_MOE},
    "llama4_text": {
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 11,
        "no_rope_layers": [1, 0, 1, 0],
        "interleave_moe_layer_step": 2,
        "floor_scale": 16,
        **_LOCAL_EXPERTS,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "minimax": {"layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR, _FULL], "block_size": 8, **_LOCAL_EXPERTS},
    "ministral": {"layer_types": [_SLIDING, _FULL] * 2, "sliding_window": 11},
    "mixtral": _LOCAL_EXPERTS,
    "nemotron_h": {
        "layers_block_type": [_LINEAR, _FULL, "mlp", _LINEAR, "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "n_routed_experts": 6,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "olmo2": {},
    "olmo3": {"layer_types": [_SLIDING, _FULL] * 2, "sliding_window": 11},
    "olmo_hybrid": {"layer_types": _HYBRID, **_DELTA},
    "phi3": {"sliding_window": 11},
    "qwen2_moe": _MOE,
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "starcoder2": {"sliding_window": 11},
}
"""More families that the shard tests cover."""

WHOLE: dict[str, dict[str, Any]] = {
    "gemma3n_text": {
        "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
        "sliding_window": 11,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "altup_num_inputs": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "zamba2": {
        "layers_block_type": [_LINEAR, "hybrid", _LINEAR, "hybrid"],
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_d_state": 8,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "num_mem_blocks": 1,
        "num_key_value_heads": 4,
        "use_mem_rope": True,
        "initializer_range": 0.1,
    },
}
"""Families that cannot be cut at all."""

FAMILIES: dict[str, dict[str, Any]] = {**CORE, **MORE}
"""Families whose tiny models can be cut anywhere."""

ALL: dict[str, dict[str, Any]] = {**FAMILIES, **WHOLE}


def num_layers(family: str) -> int:
    """Layers of the tiny model of ``family``."""
    settings = ALL[family]
    pattern = settings.get("layer_types") or settings.get("layers_block_type")
    return len(pattern) if pattern else settings.get("num_hidden_layers", 4)


def save_tiny(family: str, folder: Path, *, seed: int = 0, max_shard_size: str = "50GB", **overrides: Any) -> Path:
    """Draw the tiny model of ``family`` in float32 and save it in ``folder``; ``overrides`` go over its config."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family, **{**_COMMON, "num_hidden_layers": num_layers(family), **ALL[family], **overrides}
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)  # else a skipped norm weight would not show
            # As drawn, gated delta layers forget within a position or two, and a wrong recurrent state would not show.
            elif name.endswith("A_log"):
                parameter.uniform_(-1.0, 0.0)
            elif name.endswith("dt_bias"):
                parameter.uniform_(-4.0, -2.0)
    model.eval()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
