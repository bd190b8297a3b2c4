"""Unpacking rows of a packed matrix into bfloat16, for products of many inputs with them.

What it costs beside the product is what counts here. So bytes are taken apart as bytes (a code less 8 is a signed
nibble, and stays 16 times as large, which its scale makes up for), every value is touched twice in bfloat16, scales lie
side by side, and the memory is the same each time: pages fresh from the system cost as much as the arithmetic.
"""

from __future__ import annotations

import threading

import torch

from meshnet_node.packed_layout import PackedLayout

UNPACKED_VALUES = 1 << 20
"""At most so many values are unpacked at a time."""


class _Scratch(threading.local):
    """A thread's memory for what it unpacks; grows to what is asked for."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def take(self, what: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Contiguous, with anything in it, valid until the same is taken again."""
        size = 1
        for length in shape:
            size *= length
        held = self._held.get(what)
        if held is None or held.numel() < size:
            with torch.inference_mode(mode=False):  # or it could be used in inference mode alone
                held = self._held[what] = torch.empty(size, dtype=dtype)
        return held[:size].view(shape)


_scratch = _Scratch()


@torch.no_grad()
def unpacked(packed: torch.Tensor, scales: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """Values of whole blocks of rows, rounded once.

    Args:
        packed: uint8 ``[blocks, groups, planes, 32, layout.rows / 2]``.
        scales: bfloat16 ``[groups, blocks * layout.rows, 2]``, scale and zero; see :mod:`meshnet_node.gguf_blocks`.

    Returns:
        bfloat16 ``[groups * 32, blocks * layout.rows]``; the memory is this thread's, and used again by its next call.
    """
    blocks, groups, planes, size, half = packed.shape
    shape = (blocks, groups, size, half)
    low, high = (_scratch.take(what, shape, torch.uint8) for what in ("low", "high"))
    if planes == 1:
        torch.bitwise_xor(packed[:, :, 0], 0x88, out=low)
        torch.bitwise_and(low, 0xF0, out=high)
        low.bitwise_left_shift_(4)
    else:
        top, bottom = packed[:, :, 0], packed[:, :, 1]
        torch.bitwise_left_shift(top, 4, out=low).bitwise_or_(bottom & 15).bitwise_xor_(0x80)
        torch.bitwise_and(top, 0xF0, out=high).bitwise_or_(bottom >> 4).bitwise_xor_(0x80)
    values = _scratch.take("values", (groups, size, blocks, layout.rows), torch.bfloat16)
    signed = [each.view(torch.int8).permute(1, 2, 0, 3) for each in (low, high)]
    _spread(values, signed[0], signed[1], layout)
    grouped = values.view(groups, size, blocks * layout.rows)
    # Two in a word. Strided, every operation with them would go value by value.
    words = scales.view(torch.int32).view(groups, 1, -1)
    scale = (words << 16).view(torch.float32)
    if planes == 2:
        grouped.mul_(scale.to(torch.bfloat16))
    else:
        zero = (words & -0x10000).view(torch.float32).to(torch.bfloat16)
        torch.addcmul(zero, grouped, scale.mul_(1 / 16).to(torch.bfloat16), out=grouped)
    return grouped.view(groups * size, -1)


def _spread(out: torch.Tensor, low: torch.Tensor, high: torch.Tensor, layout: PackedLayout) -> None:
    """Put what came from low and from high halves of bytes where their rows are, along the last dimension."""
    if layout.is_halved:
        out[..., : layout.rows // 2] = low
        out[..., layout.rows // 2 :] = high
    else:
        out[..., layout.low] = low.to(out.dtype)
        out[..., layout.high] = high.to(out.dtype)
