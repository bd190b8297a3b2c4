"""Numbers that kernels are tried on."""

from __future__ import annotations

import torch


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """Values of many sizes, in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 4 ** torch.randn(shape, generator=generator)
    return values.to(torch.bfloat16)
