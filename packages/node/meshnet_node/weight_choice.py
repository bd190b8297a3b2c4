"""What ``--quantize`` means on a device: which weights are held packed. Pure; knows no models and no files."""

from __future__ import annotations

import torch

from meshnet_core.errors import InvalidInputError

QUANTIZE = ("auto", "none")
"""The names that the option takes."""


def keeps_packed(quantize: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights that a file holds in blocks of four or eight bits stay so, rather than be de-quantised.

    ``auto`` keeps them where there is a product for them: torch's packed one, on CPUs and in bfloat16 (in float32 it is
    many times slower than the de-quantised product).

    Raises:
        InvalidInputError: an unknown name.
    """
    if quantize not in QUANTIZE:
        raise InvalidInputError(f"--quantize {quantize!r} is unknown; write {', '.join(QUANTIZE)}")
    return quantize == "auto" and device.type == "cpu" and dtype is torch.bfloat16
