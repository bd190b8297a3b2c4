"""The random-weight Qwen2 checkpoint as a GGUF file, as llama.cpp's converter would name and order it.

Weights stay bfloat16; the tokenizer is a stand-in of the right size, since random weights have none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_qwen2_gguf(folder: Path, path: Path) -> None:
    """Write the model of a Hugging Face folder of model type qwen2 to ``path``."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    writer: Any = gguf.GGUFWriter(path, "qwen2")  # untyped
    writer.add_name(path.stem)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    _add_tokenizer(writer, config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config["num_hidden_layers"])
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - safetensors' own file object, which is no mapping
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if found is None:
                raise ValueError(f"GGUF has no name for {name}")
            value = tensors.get_tensor(name)
            if value.dim() == 1:  # norms and biases, which llama.cpp keeps in float32
                writer.add_tensor(found, value.float().numpy())
            else:
                raw = value.contiguous().view(torch.uint8).numpy()
                writer.add_tensor(found, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, vocabulary: int) -> None:
    """Single bytes, one merge, and names without a meaning for the rest."""
    known = [*SPECIALS, *_byte_tokens(), "ab"]
    filler = [f"<|unused_{index}|>" for index in range(vocabulary - len(known))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*known, *filler])
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(known) - len(SPECIALS)) + [5] * len(filler))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def _byte_tokens() -> list[str]:
    table: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    return list(table.values())
