"""Which GGUF files can be read rightly, and the refusals, each with a reason, of those that cannot.

transformers reads a GGUF with gaps that it does not tell of; a file that falls into one is refused here,
before any work.
Knows metadata and block types, not how tensors are converted. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from meshnet_core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from meshnet_node.gguf_header import GgufHeader

USE_SAFETENSORS = "use the model's Hugging Face folder or hub id (safetensors) instead"
# What llama.cpp calls an architecture, where transformers' table of readers spells it otherwise.
_ALIASES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}
# Mixture-of-experts files whose experts transformers' reader fuses; under any other name it would leave them out.
_MOE = frozenset({"qwen2moe", "qwen3moe", "qwen35moe"})


def check_supported(header: GgufHeader, path: Path, readable: Collection[str]) -> None:
    """Refuse a file that transformers cannot read, or would read wrongly.

    Args:
        header: the file's head.
        path: for messages.
        readable: the architectures that transformers reads.

    Raises:
        UnsupportedModelError: with the architecture, the reason and what would work instead.
    """
    arch, metadata = header.architecture, header.metadata
    if arch not in readable and _ALIASES.get(arch) not in readable:
        raise UnsupportedModelError(
            f"{path.name} has the architecture {arch}, which transformers cannot read from GGUF; {USE_SAFETENSORS}. "
            f"Readable from GGUF: {', '.join(sorted(readable))}"
        )
    if metadata.get("general.type", "model") != "model":
        raise UnsupportedModelError(f"{path.name} is a GGUF of type {metadata['general.type']}, not of a whole model")
    if metadata.get("split.count", 0) > 1:
        raise UnsupportedModelError(
            f"{path.name} is one of {metadata['split.count']} split files; join them first with "
            f"`llama-gguf-split --merge`, or {USE_SAFETENSORS}"
        )
    if metadata.get(f"{arch}.expert_count", 0) and arch not in _MOE:
        raise UnsupportedModelError(
            f"{path.name} is a mixture of experts of architecture {arch}; from GGUF only {', '.join(sorted(_MOE))} are "
            f"read rightly; {USE_SAFETENSORS}"
        )
    scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
    if scaling != "none" and metadata.get(f"{arch}.rope.scaling.factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"{path.name} scales its rotary positions ({scaling}), which transformers drops when it reads {arch} from "
            f"GGUF, so long prompts would go wrong; {USE_SAFETENSORS}"
        )
    for kind in {tensor.ggml_type for tensor in header.tensors.values()}:
        if not _can_dequantize(kind):
            raise UnsupportedModelError(
                f"{path.name} holds tensors of type {kind.name}, which cannot be de-quantised here; quantise the model "
                f"another way (Q8_0, Q4_K_M) or {USE_SAFETENSORS}"
            )


def _can_dequantize(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        return False
    return True
