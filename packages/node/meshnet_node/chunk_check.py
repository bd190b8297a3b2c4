"""Whether a library's functions for chunks give what torch gives, in every way that the CPU has. Knows no compiler."""

from __future__ import annotations

import torch
from torch.nn import functional

from meshnet_node.chunk_room import ChunkRoom
from meshnet_node.column_layout import in_columns
from meshnet_node.kernel_library import COLUMN, AttentionShape, ChunkShape, MatrixShape, ProductWay, StepKernels
from meshnet_node.kernel_numbers import drawn, same

_ROWS = (1, 2, 5, 6, 7, 13)
"""Of chunks: with these, of groups of every size that the kernel has."""
_INPUTS = (68, 780)
"""Of matrices: one block, and several that are not of one size."""
_NEAR = {torch.bfloat16: 2**-6, torch.float32: 2**-15}
"""Of float32, sums in another order, and another e^x."""
_ATTENTIONS = ((2, 2, 128, 5, 300), (1, 2, 64, 262, 269))
"""Heads of keys, heads that share one, width, count and positions: positions of two blocks, and chunks of one part, and
of several, whose first rows see nothing of the second block."""


def check_chunks(kernels: StepKernels) -> None:
    """Compare products and attention of chunks.

    Raises:
        UnsupportedModelError: something differs by more than rounding.
    """
    if not kernels.product_ways:
        return
    draw, room = torch.Generator().manual_seed(1), ChunkRoom()
    for dtype in _NEAR:
        _check_rows(kernels, draw, dtype)
    for inputs in _INPUTS:
        _check_products(kernels, draw, room, inputs)
    for form in _ATTENTIONS:
        _check_attention(kernels, draw, room, *form)


def _check_rows(kernels: StepKernels, draw: torch.Generator, dtype: torch.dtype) -> None:
    """Of 3 positions behind 2, with 2 heads over 1, norms of heads, and rope."""
    rows, width, eps, is_float = 3, COLUMN, 1e-5, dtype is torch.float32
    near, alone = _NEAR[dtype], (1, None)
    x, other, gates, weight = (
        drawn(draw, *size).to(dtype) for size in ((rows, width), (rows, width), (rows, 2 * width), (width,))
    )
    summed, out = x + other, torch.empty_like(x)
    x_at, out_at = x.data_ptr(), out.data_ptr()
    kernels.chunk_add_norm(is_float, x_at, other.data_ptr(), weight.data_ptr(), out_at, rows, width, eps, *alone)
    same("sum of a chunk", x, summed, near)
    same("norm of a chunk", out, functional.rms_norm(summed, (width,), None, eps) * weight, near)
    kernels.chunk_silu_mul(is_float, gates.data_ptr(), out_at, rows, width, *alone)
    same("gate of a chunk", out, functional.silu(gates[:, :width]) * gates[:, width:], near)
    qkv, norms = drawn(draw, rows, 4, width).to(dtype), drawn(draw, 3, width).to(dtype)
    cosines, sines, keys, values = (drawn(draw, size, width).to(dtype) for size in (rows, rows, 2 + rows, 2 + rows))
    turned = functional.rms_norm(qkv[:, :3], (width,), None, eps) * norms
    turned = turned * cosines[:, None] + turned.roll(width // 2, -1) * sines[:, None]
    key, value = torch.cat([keys[:2], turned[:, 2]]), torch.cat([values[:2], qkv[:, 3]])
    addresses = (each.data_ptr() for each in (qkv, cosines, sines, keys, values))
    shape = AttentionShape(norms.data_ptr(), 2, 1, width, 1, 1.0, eps)
    kernels.chunk_take_in(shape, is_float, rows, *addresses, keys.numel(), values.numel(), 2, *alone)
    same("queries of a chunk", qkv[:, :2], turned[:, :2], near)
    same("keys of a chunk", keys, key, near)
    same("values of a chunk", values, value, near)


def _check_products(kernels: StepKernels, draw: torch.Generator, room: ChunkRoom, inputs: int) -> None:
    out, order = 2 * COLUMN, torch.cat([torch.arange(count) for count in _ROWS])
    drawns = drawn(draw, max(_ROWS), inputs), drawn(draw, out, inputs) / 16, drawn(draw, out)
    product = functional.linear(drawns[0].float(), drawns[1].float())
    for way in sorted(kernels.product_ways):
        x, weight, bias = drawns if way else (each.float() for each in drawns)
        laid, made = in_columns(weight), torch.empty(len(order), out, dtype=x.dtype)
        for bias_at, wanted in ((None, product), (bias.data_ptr(), product + bias)):
            shape = MatrixShape(laid.data_ptr(), bias_at, inputs, out, way)
            at, start = room.at(kernels.product_room(shape, max(_ROWS), 1)), 0
            for count in _ROWS:
                kernels.product(shape, count, x.data_ptr(), made[start].data_ptr(), at, 1, None)
                start += count
            same("product of a chunk", made, wanted[order].to(x.dtype), _NEAR[x.dtype])


def _check_attention(
    kernels: StepKernels,
    draw: torch.Generator,
    room: ChunkRoom,
    key_heads: int,
    sharing: int,
    width: int,
    count: int,
    positions: int,
) -> None:
    """Heads of queries lie side by side, as a product leaves them; those of keys have room behind them."""
    heads, rows, scaling = key_heads * sharing, positions + 3, width**-0.5
    tensors = [drawn(draw, count, heads, width), *(drawn(draw, key_heads, rows, width) for _ in range(2))]
    query, keys, values = (each.float() for each in tensors)
    wanted = functional.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys[None, :, :positions],
        values[None, :, :positions],
        attn_mask=torch.ones(count, positions, dtype=torch.bool).tril(positions - count),
        enable_gqa=True,
    )[0].transpose(0, 1)
    strides = (heads * width, width, rows * width, rows * width)
    at = room.at(kernels.chunk_room(width))
    for way in sorted(kernels.product_ways & {ProductWay.FLOATS, ProductWay.WIDENED}):
        given = tensors if way else [query, keys, values]
        found = torch.empty_like(given[0])
        addresses = (each.data_ptr() for each in (*given, found))
        shape = ChunkShape(*addresses, *strides, heads, key_heads, width, positions, count, way, scaling)
        kernels.attend_chunk(shape, at, 1, None)
        same("attention of a chunk", found, wanted.to(found.dtype), _NEAR[found.dtype])
