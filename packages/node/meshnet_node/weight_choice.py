"""What ``--quantize`` means on a device: which weights are held packed. Pure; knows no models and no files."""

from __future__ import annotations

import torch

from meshnet_core.errors import InvalidInputError, UnsupportedModelError
from meshnet_node.gguf_blocks import HELD

QUANTIZE = ("auto", "none", "int8", "int4")
"""The names that the option takes."""

ROUNDS = frozenset(HELD.values())
"""Those that change weights, and so the model."""


def keeps_packed(quantize: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights that a file holds in blocks of four or eight bits stay so, rather than be de-quantised.

    ``auto`` keeps them where there is a product for them: torch's packed one, on CPUs and in bfloat16 (in float32 it is
    many times slower than the de-quantised product). ``int8`` and ``int4`` also round what is stored wider.

    Raises:
        InvalidInputError: an unknown name.
        UnsupportedModelError: ``int8`` or ``int4`` where there is no such product.
    """
    if quantize not in QUANTIZE:
        raise InvalidInputError(f"--quantize {quantize!r} is unknown; write {', '.join(QUANTIZE)}")
    possible = device.type == "cpu" and dtype is torch.bfloat16
    if quantize in ROUNDS and not possible:
        raise UnsupportedModelError(
            f"--quantize {quantize} is for CPUs and bfloat16, where torch has a product of packed weights, not for "
            f"{device.type} and {str(dtype).removeprefix('torch.')}; add --device cpu --dtype bfloat16, or leave it out"
        )
    return possible and quantize != "none"
