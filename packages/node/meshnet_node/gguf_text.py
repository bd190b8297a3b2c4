"""The text side of a GGUF file as a Hugging Face folder has it: config, generation config, tokenizer, chat template.

All of it is read by transformers (``gguf_file=``); here it is saved, and what transformers leaves out is filled in.
Knows nothing of tensors and caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshnet_core.errors import UnsupportedModelError
from meshnet_node.gguf_rope import restore_rope_factors
from meshnet_node.gguf_support import USE_SAFETENSORS, check_supported

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PretrainedConfig

    from meshnet_node.gguf_header import GgufHeader

# Sizes that transformers leaves at its config class's default, which is one model's: architecture, then metadata key
# to config name.
_LEFT_OUT = {
    "qwen3": {"attention.key_length": "head_dim"},
    "qwen3moe": {"expert_feed_forward_length": "moe_intermediate_size"},
    "qwen2moe": {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
}
# Further tokens that end an answer; transformers reads only eos.
_END_KEYS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def save_text_files(path: Path, header: GgufHeader, folder: Path) -> None:
    """Write the files a gateway needs for text, and ``config.json``, into an existing folder.

    Raises:
        UnsupportedModelError: an architecture or a tokenizer that transformers cannot read from GGUF.
    """
    check_supported(header, path, {*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_ARCHS})
    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(path.parent, trust_remote_code=False, **where)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, trust_remote_code=False, **where)
    except Exception as error:
        raise UnsupportedModelError(
            f"transformers cannot read {path.name} (architecture {header.architecture}): {error}; {USE_SAFETENSORS}"
        ) from error
    if (name := MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)) is None:
        raise UnsupportedModelError(f"{path.name} ({config.model_type}) is no causal language model")
    config.architectures = [name] if isinstance(name, str) else [name[0]]
    if "_model_name_or_path" in vars(config):  # the file's title, which would be taken for a place to load from
        del config._model_name_or_path
    for key, setting in _LEFT_OUT.get(header.architecture, {}).items():
        if (value := header.metadata.get(f"{header.architecture}.{key}")) is not None:
            setattr(config, setting, value)
    restore_rope_factors(config, header, path)
    config.save_pretrained(folder)
    _generation_config(config, header).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _generation_config(config: PretrainedConfig, header: GgufHeader) -> GenerationConfig:
    generation = GenerationConfig.from_model_config(config)
    eos = generation.eos_token_id
    ends = list(eos) if isinstance(eos, list) else [eos] if eos is not None else []
    ends += [header.metadata[key] for key in _END_KEYS if key in header.metadata]
    ends = list(dict.fromkeys(ends))
    if ends:
        generation.eos_token_id = ends if len(ends) > 1 else ends[0]
    return generation
