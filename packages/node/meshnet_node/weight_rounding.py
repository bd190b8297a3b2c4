"""Rounding floating weights to 4 and 8 bits in groups of 32 along a row: the codes of :mod:`meshnet_node.gguf_blocks`.

Round to nearest, with no data: 8 bits by the largest magnitude of a group; 4 bits between a group's least and greatest
value, that span shrunk a little where the squared error is smaller so (a few values far out then cost the others less).
The codes are chosen for scales as they will be held, in bfloat16. Knows no models and no packed layouts.
"""

from __future__ import annotations

import torch

from meshnet_node.gguf_blocks import GROUP, CodedRows, coded_bytes

_SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Parts of the span that are tried."""


@torch.inference_mode()
def rounded(values: torch.Tensor, planes: int) -> CodedRows:
    """The nearest codes.

    Args:
        values: floating, ``[rows, columns]`` with columns a multiple of 32.
        planes: 1 for 4 bits, 2 for 8.
    """
    grouped = values.float().reshape(values.shape[0], -1, GROUP)
    if planes == 2:
        return _bytes(grouped)
    least, greatest = grouped.amin(dim=-1, keepdim=True), grouped.amax(dim=-1, keepdim=True)
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    lowest = torch.full_like(least, torch.inf)
    for part in _SHRUNK:
        found = _nibbles(grouped, least, greatest, part)
        error = (_values(*found) - grouped).square().sum(dim=-1, keepdim=True)
        better = error < lowest
        best = found if best is None else _where(better, found, best)
        lowest = torch.where(better, error, lowest)
    codes, scale, zero = best or found
    flat = codes.to(torch.uint8).reshape(values.shape[0], -1)
    return CodedRows(flat.numpy(), scale.squeeze(-1).numpy(), zero.squeeze(-1).numpy())


def _nibbles(
    grouped: torch.Tensor, least: torch.Tensor, greatest: torch.Tensor, part: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scale and zero for the middle ``part`` of the span."""
    middle = (least + greatest) / 2
    scale = _held(part * (greatest - least) / 15)
    zero = _held(middle + scale / 2)  # code 7.5 is the middle
    codes = ((grouped - zero) / scale.where(scale > 0, 1.0)).round().add(8).clamp(0, 15)
    return codes, scale, zero


def _values(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return (codes - 8) * scale + zero


def _where(
    mask: torch.Tensor, first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, scale, zero = (torch.where(mask, one, other) for one, other in zip(first, second, strict=True))
    return codes, scale, zero


def _bytes(grouped: torch.Tensor) -> CodedRows:
    scale = _held(grouped.abs().amax(dim=-1, keepdim=True) / 127)
    codes = (grouped / scale.where(scale > 0, 1.0)).round().clamp(-128, 127).to(torch.int8)
    return coded_bytes(codes.reshape(grouped.shape[0], -1).numpy(), scale.squeeze(-1).numpy())


def _held(values: torch.Tensor) -> torch.Tensor:
    """As bfloat16 has them."""
    return values.to(torch.bfloat16).float()
