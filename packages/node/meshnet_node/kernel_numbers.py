"""Numbers for checks of kernels, always the same ones, and how near to torch's a result has to be. Knows no kernels."""

from __future__ import annotations

import torch

from meshnet_core.errors import UnsupportedModelError


def drawn(draw: torch.Generator, *shape: int) -> torch.Tensor:
    """In bfloat16."""
    return torch.randn(shape, generator=draw).bfloat16()


def same(what: str, ours: torch.Tensor, torchs: torch.Tensor, near: float = 2**-6) -> None:
    """See whether both are alike.

    Args:
        what: for the error's message.
        ours, torchs: of one shape.
        near: by which part of a value they may differ, and half of it beside results that nearly cancel; else two units
            in the last place of bfloat16.

    Raises:
        UnsupportedModelError: they are not.
    """
    if not torch.allclose(ours.float(), torchs.float(), rtol=near, atol=near / 2):
        raise UnsupportedModelError(f"what this machine's compiler made of them gives another {what} than torch")
