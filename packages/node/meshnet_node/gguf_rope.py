"""The rotary frequency factors of Llama 3.1 and later, which transformers drops when it reads a GGUF.

llama.cpp writes what ``rope_type: llama3`` computes as a tensor of divisors, one per rotary frequency, without the four
numbers behind them. All published models share three of the four; the fourth is the largest divisor. They are put back
into the config only if they give the tensor's very values, else the file is refused.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from meshnet_core.errors import UnsupportedModelError
from meshnet_node.gguf_support import USE_SAFETENSORS
from meshnet_node.gguf_values import GgufValues

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PretrainedConfig

    from meshnet_node.gguf_header import GgufHeader

    Array = np.ndarray[Any, np.dtype[Any]]

ROPE_FACTORS = "rope_freqs.weight"
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192


def restore_rope_factors(config: PretrainedConfig, header: GgufHeader, path: Path) -> None:
    """Put the frequency scaling of a file that has :data:`ROPE_FACTORS` into its config; others are left as they are.

    Raises:
        UnsupportedModelError: factors that are not Llama 3's.
    """
    if (tensor := header.tensors.get(ROPE_FACTORS)) is None:
        return
    with GgufValues(path) as file:
        stored = file.whole(tensor)
    base, width = float(config.rope_parameters["rope_theta"]), 2 * len(stored)
    if config.model_type != "llama" or not np.allclose(stored, _factors(base, width, float(stored.max())), rtol=1e-5):
        raise UnsupportedModelError(
            f"{path.name} scales its rotary frequencies ({ROPE_FACTORS}) in a way not known here, and transformers "
            f"drops it; {USE_SAFETENSORS}"
        )
    config.rope_parameters = {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": float(stored.max()),
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }


def _factors(base: float, width: int, factor: float) -> Array:
    """Divisors of the frequencies of a rotary width, as llama.cpp's ``convert_hf_to_gguf.py`` computes them."""
    lengths = 2 * math.pi * base ** (np.arange(0, width, 2) / width)
    smooth = (_ORIGINAL / lengths - _LOW) / (_HIGH - _LOW)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(lengths < _ORIGINAL / _HIGH, 1.0, np.where(lengths > _ORIGINAL / _LOW, factor, between))
