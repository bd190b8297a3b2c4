"""Whether a library's functions give what torch gives, on numbers that are always the same. Knows no compiler."""

from __future__ import annotations

import torch
from torch.nn import functional

from meshnet_node.chunk_check import check_chunks
from meshnet_node.column_layout import in_columns
from meshnet_node.kernel_library import (
    ATTENDED,
    COLUMN,
    MOST_SHARING,
    AttentionShape,
    DeltaShape,
    MatrixShape,
    MixtureShape,
    StepKernels,
)
from meshnet_node.kernel_numbers import drawn, same


def check(kernels: StepKernels) -> None:
    """Compare what ``kernels`` give with what torch gives, on numbers that are always the same.

    Raises:
        UnsupportedModelError: something differs by more than rounding.
    """
    draw = torch.Generator().manual_seed(0)
    rows, width, eps = 3, 80, 1e-5
    inputs, other, gates = (drawn(draw, rows, columns) for columns in (width, width, 2 * width))
    weight, out, summed = drawn(draw, width), torch.empty_like(inputs), inputs.clone()
    kernels.norm(inputs.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, eps)
    same("norm", out, functional.rms_norm(inputs, (width,), None, eps) * weight)
    kernels.add_norm(summed.data_ptr(), other.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, eps)
    same("sum", summed, inputs + other)
    same("norm of a sum", out, functional.rms_norm(summed, (width,), None, eps) * weight)
    kernels.add(summed.data_ptr(), other.data_ptr(), summed.numel())
    same("second sum", summed, inputs + other + other)
    kernels.silu_mul(gates.data_ptr(), out.data_ptr(), rows, width)
    same("gate", out, functional.silu(gates[:, :width]) * gates[:, width:])
    for heads, key_heads, width, turns, positions in ((6, 2, 64, 1, 300), (5, 1, 128, 0, 37), (2, 2, 24, 1, 37)):
        shape = AttentionShape(None, heads, key_heads, width, turns, width**-0.5, eps)
        _check_attention(kernels, draw, shape, positions)
    for heads, key_heads, width, key_width in ((4, 2, 64, 32), (2, 2, 128, 16), (3, 1, 24, 40), (1, 1, 200, 8)):
        _check_delta(kernels, draw, DeltaShape(None, None, None, None, heads, key_heads, width, key_width, 4, eps))
    _check_products(kernels, draw)
    _check_experts(kernels, draw)
    _check_take(kernels, draw)
    check_chunks(kernels)


def _check_attention(kernels: StepKernels, draw: torch.Generator, shape: AttentionShape, positions: int) -> None:
    """With norms of heads where it has rope."""
    heads, key_heads, width = shape.heads, shape.key_heads, shape.width
    projected, weight = drawn(draw, heads + 2 * key_heads, width), drawn(draw, heads + key_heads, width)
    cosines, sines = drawn(draw, width), drawn(draw, width)
    turned, value = projected[:-key_heads], projected[-key_heads:].clone()
    if shape.turns:
        shape.head_norm = weight.data_ptr()
        turned = functional.rms_norm(turned, (width,), None, shape.eps) * weight
        turned = turned * cosines + turned.roll(width // 2, -1) * sines
    query, key = turned[:heads].clone(), turned[heads:].clone()
    keys, values = (drawn(draw, key_heads, positions + 3, width) for _ in range(2))
    room = torch.empty(-(-positions // ATTENDED) * heads * (width + 2))
    found = torch.empty(heads, width, dtype=torch.bfloat16)
    kernels.attend(
        *(shape, projected.data_ptr(), cosines.data_ptr(), sines.data_ptr(), keys.data_ptr(), values.data_ptr()),
        *(keys.stride(0), values.stride(0), positions, room.data_ptr(), found.data_ptr(), 1, None),
    )
    same("new keys and values", torch.cat([keys[:, positions - 1], values[:, positions - 1]]), torch.cat([key, value]))
    attended = functional.scaled_dot_product_attention(
        query.float().view(1, heads, 1, width),
        keys[:, :positions].float().unsqueeze(0),
        values[:, :positions].float().unsqueeze(0),
        enable_gqa=True,
    )
    same("attention", found, attended.view(heads, width).bfloat16())


def _check_delta(kernels: StepKernels, draw: torch.Generator, shape: DeltaShape) -> None:
    """The rule as its authors have it: https://arxiv.org/abs/2412.06464."""
    rows, heads, key_heads, width, key_width = 2, shape.heads, shape.key_heads, shape.width, shape.key_width
    keys = key_heads * key_width
    mixed, conv = drawn(draw, rows, 2 * keys + heads * width), drawn(draw, 2 * keys + heads * width, shape.taps)
    gate, norm, out = (drawn(draw, *sizes) for sizes in ((rows, heads, width), (width,), (rows, heads, width)))
    beta, step = drawn(draw, rows, heads), drawn(draw, rows, heads)
    rate, step_bias = -drawn(draw, heads).float().exp(), drawn(draw, heads).float()
    columns = [drawn(draw, *conv.shape) for _ in range(rows)]
    states = [drawn(draw, heads, key_width, width).float() for _ in range(rows)]
    seen = [torch.cat([kept[:, 1:], new[:, None]], 1) for kept, new in zip(columns, mixed, strict=True)]
    before, room = [state.clone() for state in states], torch.empty(mixed.shape[1])
    shape.conv, shape.norm = conv.data_ptr(), norm.data_ptr()
    shape.rate, shape.step_bias = rate.data_ptr(), step_bias.data_ptr()
    kept = torch.tensor([[c.data_ptr(), s.data_ptr()] for c, s in zip(columns, states, strict=True)])
    given = (mixed, gate, beta, step, room, out)
    kernels.delta(shape, rows, kept.data_ptr(), *(tensor.data_ptr() for tensor in given))
    for row in range(rows):
        convolved = functional.silu((seen[row].float() * conv.float()).sum(1).bfloat16()).float()
        query, key, value = torch.split(convolved, [keys, keys, heads * width])
        query, key = (
            functional.normalize(of.view(key_heads, key_width), dim=1).repeat_interleave(heads // key_heads, 0)
            for of in (query, key)
        )
        state = before[row] * (rate * functional.softplus(step[row].float() + step_bias)).exp()[:, None, None]
        change = (value.view(heads, width) - torch.einsum("hkw,hk->hw", state, key)) * beta[row].sigmoid()[:, None]
        state += torch.einsum("hk,hw->hkw", key, change)
        found = (torch.einsum("hkw,hk->hw", state, query) * key_width**-0.5).bfloat16()
        wanted = functional.rms_norm(found, (width,), None, shape.eps) * norm * functional.silu(gate[row].float())
        same("convolution", columns[row], seen[row])
        same("state", states[row], state)
        same("answer of a state", out[row], wanted)


def _check_products(kernels: StepKernels, draw: torch.Generator) -> None:
    """Of one row more than are taken at once, and fewer: groups of every size."""
    inputs, out = 12, 2 * COLUMN
    x, matrix, bias = drawn(draw, MOST_SHARING + 1, inputs), drawn(draw, out, inputs), drawn(draw, out)
    columns = in_columns(matrix)
    for rows in range(1, MOST_SHARING + 2):
        given = bias if rows % 2 else None
        shape = MatrixShape(columns.data_ptr(), None if given is None else given.data_ptr(), inputs, out, 0)
        found = torch.empty(rows, out, dtype=torch.bfloat16)
        kernels.few(shape, rows, x.data_ptr(), found.data_ptr(), 1, None)
        same("product", found, functional.linear(x[:rows], matrix, given))


def _check_experts(kernels: StepKernels, draw: torch.Generator) -> None:
    """Of one expert more than is there, and one that more rows choose than are taken at once."""
    rows, count, chosen, hidden, inner = 6, 3, 2, 2 * COLUMN, COLUMN
    gate_up = [drawn(draw, 2 * inner, hidden) / 8 for _ in range(count)]
    down = [drawn(draw, hidden, inner) / 8 for _ in range(count)]
    laid = [[in_columns(matrix) for matrix in stack] for stack in (gate_up, down)]
    addresses = [torch.tensor([matrix.data_ptr() for matrix in stack]) for stack in laid]
    x, weights = drawn(draw, rows, hidden), drawn(draw, rows, chosen)
    experts = torch.tensor([[0, 1], [1, 2], [1, 0], [1, count], [2, 1], [1, 0]])
    shape = MixtureShape(addresses[0].data_ptr(), addresses[1].data_ptr(), count, chosen, hidden, inner, 1)
    room = torch.empty(MOST_SHARING, 2 * inner + hidden, dtype=torch.bfloat16)
    made, out = torch.empty(rows, chosen, hidden), torch.empty_like(x)
    for weighing in (weights, weights.float()):  # rounded to bfloat16 once weighted, or not
        shape.rounds = weighing.dtype is torch.bfloat16
        given = (x, experts, weights.float(), room, made, out)
        kernels.experts(shape, rows, *(tensor.data_ptr() for tensor in given))
        wanted = torch.zeros(rows, hidden)
        for row, place in ((row, place) for row in range(rows) for place in range(chosen)):
            if (expert := int(experts[row, place])) < count:
                both = functional.linear(x[row], gate_up[expert])
                one = functional.linear(functional.silu(both[:inner]) * both[inner:], down[expert])
                wanted[row] += (one * weighing[row, place]).float()
        same("sum of experts", out, wanted.bfloat16())


def _check_take(kernels: StepKernels, draw: torch.Generator) -> None:
    """Of a block of four rows, two a byte, and two groups of 32 columns: the row at byte 1, in its upper half."""
    groups, half, group = 2, 2, 32
    for planes in (1, 2):
        codes = torch.randint(0, 256, (groups, planes, group, half), generator=draw, dtype=torch.uint8)
        scales, out = drawn(draw, groups, 4, 2), torch.empty(groups, group, dtype=torch.bfloat16)
        at = (codes.data_ptr(), scales[:, 3].data_ptr(), out.data_ptr())
        kernels.take(*at, groups, planes, half, 1, 4, scales.stride(0))
        own = (codes[..., 1] >> 4).float()
        scale, zero = scales[:, 3, :1].float(), scales[:, 3, 1:].float()
        wanted = (own[:, 0] - 8) * scale + zero if planes == 1 else (16 * own[:, 0] + own[:, 1] - 128) * scale
        same("row of a packed matrix", out, wanted.bfloat16())
