"""Tiny random GGUF files of several architectures, written with gguf's own writer.

Names and metadata keys come from transformers' tables, read backwards; values are random. They are meant for comparing
two ways of reading the same file, so nothing here undoes or applies llama.cpp's layout.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers.modeling_gguf_pytorch_utils as reader
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from meshnet_core.layer_range import LayerRange
from meshnet_node.model_files import open_model

Q8, F32, F16 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>{% endfor %}"
)
VOCAB = 256 + len(SPECIALS) + 1


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
"""Of the tiny llama, and of others like it."""


@dataclass
class TinyGguf:
    """What goes into a file: ``tensors`` maps a GGUF name to fp32 values and the type to store them as."""

    arch: str
    metadata: dict[str, Any]
    tensors: dict[str, tuple[np.ndarray[Any, Any], gguf.GGMLQuantizationType]] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.arch)
        for key, value in self.metadata.items():
            _add_value(writer, key, value)
        _add_tokenizer(writer)
        for name, (values, kind) in self.tensors.items():
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def processed(arch: str, model_type: str, *, seed: int = 0, **settings: Any) -> TinyGguf:
    """A file of an architecture that transformers reads with its table of keys and its tensor processors."""
    config = AutoConfig.for_model(
        model_type, vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, pad_token_id=2, **settings
    )
    keys: Any = GGUF_CONFIG_MAPPING[
        {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "minimax-m2": "minimax_m2"}.get(arch, arch)
    ]
    metadata = {f"{arch}.{key}": _setting(config, name) for key, name in keys.items() if name is not None}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    make_processor: Any = reader.TENSOR_PROCESSORS.get(arch, reader.TensorProcessor)
    state = model.state_dict()
    rng = np.random.default_rng(seed)
    tensors = {}
    for gguf_name, name in reader.get_gguf_hf_weights_map(model, make_processor(config=config.to_dict())).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        shape = tuple(state[name].shape)
        if gguf_name.endswith("_exps"):  # fused experts: the map's names lack the suffix that files have
            continue
        if "ffn_gate_inp_shexp" in gguf_name:
            shape = shape[1:]
        tensors[gguf_name] = _drawn(rng, shape)
    for name, value in state.items():
        if match := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj", name):
            experts, rows, columns = value.shape
            if match[2] == "down":
                tensors[f"blk.{match[1]}.ffn_down_exps.weight"] = _drawn(rng, (experts, rows, columns))
            else:
                # up before gate: the order in the file must not matter
                for half in ("up", "gate"):
                    tensors[f"blk.{match[1]}.ffn_{half}_exps.weight"] = _drawn(rng, (experts, rows // 2, columns))
    return TinyGguf(arch, metadata, tensors)


def _setting(config: Any, name: str) -> Any:
    if name != "rope_theta":
        return getattr(config, name)
    rope = config.rope_parameters
    return rope.get("rope_theta") or rope["full_attention"]["rope_theta"]


def _drawn(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], gguf.GGMLQuantizationType]:
    values = rng.standard_normal(shape, np.float32)
    return values, F32 if len(shape) == 1 else Q8 if shape[-1] % 32 == 0 else F16


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Byte-level with one merge: a byte is a token."""
    alphabet: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*SPECIALS, *alphabet.values(), "ab"])
    writer.add_token_types([3] * len(SPECIALS) + [1] * 257)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)


def qwen35(*, moe: bool = False, seed: int = 0) -> TinyGguf:
    """A Qwen3.5 file, dense or mixture of experts: three linear-attention layers, a full one, and a drafting block."""
    arch = "qwen35moe" if moe else "qwen35"
    hidden, heads, kv_heads, head_dim, wide = 32, 4, 2, 32, 64
    key_heads, value_heads, key_dim, value_dim = 2, 4, 8, 8
    metadata: dict[str, Any] = {
        "context_length": 512,
        "embedding_length": hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "full_attention_interval": 4,
        "ssm.conv_kernel": 4,
        "ssm.state_size": key_dim,
        "ssm.group_count": key_heads,
        "ssm.time_step_rank": value_heads,
        "ssm.inner_size": value_heads * value_dim,
        "block_count": 5,
        "nextn_predict_layers": 1,
        "rope.freq_base": 10000.0,
        "rope.dimension_sections": [2, 1, 1, 0],
        "rope.dimension_count": 8,
    }
    metadata |= (
        {
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 32,
            "expert_count": 4,
            "expert_used_count": 2,
        }
        if moe
        else {"feed_forward_length": wide}
    )
    inner, conv = value_heads * value_dim, 2 * key_heads * key_dim + value_heads * value_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, hidden), "output_norm.weight": (hidden,)}
    for layer in range(4):
        block: dict[str, tuple[int, ...]] = {"attn_norm.weight": (hidden,), "post_attention_norm.weight": (hidden,)}
        if layer == 3:
            block |= {
                "attn_q.weight": (2 * heads * head_dim, hidden),
                "attn_k.weight": (kv_heads * head_dim, hidden),
                "attn_v.weight": (kv_heads * head_dim, hidden),
                "attn_output.weight": (hidden, heads * head_dim),
                "attn_q_norm.weight": (head_dim,),
                "attn_k_norm.weight": (head_dim,),
            }
        else:
            block |= {
                "attn_qkv.weight": (conv, hidden),
                "attn_gate.weight": (inner, hidden),
                "ssm_alpha.weight": (value_heads, hidden),
                "ssm_beta.weight": (value_heads, hidden),
                "ssm_conv1d.weight": (conv, 4),
                "ssm_norm.weight": (value_dim,),
                "ssm_out.weight": (hidden, inner),
                "ssm_a": (value_heads,),
                "ssm_dt.bias": (value_heads,),
            }
        if moe:
            block |= {
                "ffn_gate_inp.weight": (4, hidden),
                "ffn_up_exps.weight": (4, 32, hidden),
                "ffn_gate_exps.weight": (4, 32, hidden),
                "ffn_down_exps.weight": (4, hidden, 32),
                "ffn_gate_inp_shexp.weight": (hidden,),
                "ffn_gate_shexp.weight": (32, hidden),
                "ffn_up_shexp.weight": (32, hidden),
                "ffn_down_shexp.weight": (hidden, 32),
            }
        else:
            block |= {
                "ffn_gate.weight": (wide, hidden),
                "ffn_up.weight": (wide, hidden),
                "ffn_down.weight": (hidden, wide),
            }
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    shapes |= {"blk.4.nextn.eh_proj.weight": (hidden, 2 * hidden), "blk.4.attn_norm.weight": (hidden,)}
    rng = np.random.default_rng(seed)
    tensors = {name: _drawn(rng, shape) for name, shape in shapes.items()}
    for name, (values, kind) in tensors.items():
        if name.endswith("ssm_a"):  # holds -exp(A_log)
            tensors[name] = (-np.exp(values), kind)
    return TinyGguf(arch, {f"{arch}.{key}": value for key, value in metadata.items()}, tensors)


def lfm2(*, seed: int = 0) -> TinyGguf:
    """An LFM2 file: convolution, convolution, attention."""
    hidden, wide, head_dim, heads = 64, 96, 16, [0, 0, 2]
    metadata = {
        "lfm2.context_length": 512,
        "lfm2.embedding_length": hidden,
        "lfm2.feed_forward_length": wide,
        "lfm2.block_count": len(heads),
        "lfm2.attention.head_count": 4,
        "lfm2.attention.head_count_kv": heads,
        "lfm2.attention.layer_norm_rms_epsilon": 1e-5,
        "lfm2.shortconv.l_cache": 3,
        "lfm2.rope.freq_base": 1e6,
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, hidden), "token_embd_norm.weight": (hidden,)}
    for layer, kv_heads in enumerate(heads):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (hidden,),
            "ffn_norm.weight": (hidden,),
            "ffn_gate.weight": (wide, hidden),
            "ffn_up.weight": (wide, hidden),
            "ffn_down.weight": (hidden, wide),
        }
        if kv_heads:
            block |= {
                "attn_q.weight": (hidden, hidden),
                "attn_k.weight": (kv_heads * head_dim, hidden),
                "attn_v.weight": (kv_heads * head_dim, hidden),
                "attn_output.weight": (hidden, hidden),
                "attn_q_norm.weight": (head_dim,),
                "attn_k_norm.weight": (head_dim,),
            }
        else:
            block |= {
                "shortconv.in_proj.weight": (3 * hidden, hidden),
                "shortconv.out_proj.weight": (hidden, hidden),
                "shortconv.conv.weight": (hidden, 3),
            }
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    rng = np.random.default_rng(seed)
    return TinyGguf("lfm2", metadata, {name: _drawn(rng, shape) for name, shape in shapes.items()})


def tiny_llama(**settings: Any) -> TinyGguf:
    return processed("llama", "llama", **{**SIZES, **settings})


def convert(path: Path, cache: Path, layers: LayerRange | None = None, dtype: str = "float32") -> Path:
    model = open_model(str(path), cache_dir=cache)
    return model.prepare(layers or LayerRange(0, model.num_layers), dtype=dtype)
