"""The C code of decode steps: what it computes, against torch's bits or double precision."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from meshnet_node.kernel_library import DeltaShape, StepKernels
from native_compiler import needs_compiler
from native_kernels import drawn

BFLOAT16 = torch.bfloat16


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 700), st.integers(0, 1000))
def test_sums_norms_and_gates_have_torchs_bits(kernels: StepKernels, rows: int, width: int, seed: int) -> None:
    inputs, other, weight = drawn(seed, rows, width), drawn(seed + 1, rows, width), drawn(seed + 2, width)
    out, summed = torch.empty_like(inputs), inputs.clone()
    kernels.norm(inputs.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, 1e-5)
    close_to_bits(out, functional.rms_norm(inputs, (width,), None, 1e-5) * weight)
    kernels.add_norm(summed.data_ptr(), other.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, 1e-6)
    assert torch.equal(summed, inputs + other)
    close_to_bits(out, functional.rms_norm(summed, (width,), None, 1e-6) * weight)
    gates = drawn(seed + 3, rows, 2 * width)
    kernels.silu_mul(gates.data_ptr(), out.data_ptr(), rows, width)
    close_to_bits(out, functional.silu(gates[:, :width]) * gates[:, width:])


def close_to_bits(ours: torch.Tensor, torchs: torch.Tensor) -> None:
    """The same, but where a sum in another order rounds to the neighbour."""
    assert (ours == torchs).double().mean() >= 0.99 or ours.numel() < 100
    torch.testing.assert_close(ours.float(), torchs.float(), rtol=2**-6, atol=1e-30)


@needs_compiler
def test_what_is_no_number_and_what_is_too_large_stay_so(kernels: StepKernels) -> None:
    odd = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), 3e38, -0.0, 1e-39], dtype=BFLOAT16)
    odd[0].view(torch.int16).fill_(0x7FFF)  # all bits of the fraction set: rounding must not carry it over
    summed = odd.clone()
    kernels.add(summed.data_ptr(), odd.data_ptr(), odd.numel())
    torch.testing.assert_close(summed, odd + odd, rtol=0, atol=0, equal_nan=True)


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from((1, 24, 64, 128, 200)),
    st.integers(1, 80),
    st.integers(2, 5),
    st.integers(0, 1000),
)
def test_a_gated_delta_rule_is_that_of_double_precision(
    kernels: StepKernels, rows: int, key_heads: int, sharing: int, width: int, key_width: int, taps: int, seed: int
) -> None:
    heads, keys = key_heads * sharing, key_heads * key_width
    channels = 2 * keys + heads * width
    mixed, conv = drawn(seed, rows, channels).clamp(-9, 9), drawn(seed + 1, channels, taps).clamp(-2, 2)
    gate, norm = drawn(seed + 2, rows, heads, width), drawn(seed + 3, width)
    beta, step = drawn(seed + 4, rows, heads), drawn(seed + 5, rows, heads)
    rate, step_bias = -drawn(seed + 6, heads).float().abs(), drawn(seed + 7, heads).float()
    columns = [drawn(seed + 8 + row, channels, taps).clamp(-9, 9) for row in range(rows)]
    states = [drawn(seed + 20 + row, heads, key_width, width).float().clamp(-9, 9) for row in range(rows)]

    def rule(row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Columns, state and what goes out; rounded to bfloat16 where the modules round."""
        seen = torch.cat([columns[row][:, 1:], mixed[row][:, None]], 1)
        summed = (seen.double() * conv.double()).sum(1).to(BFLOAT16)
        query, key, value = functional.silu(summed).double().split([keys, keys, heads * width])
        query, key = (
            (of / (of.square().sum(1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(sharing, 0)
            for of in (query.view(key_heads, key_width), key.view(key_heads, key_width))
        )
        fade = (rate.double() * functional.softplus(step[row].double() + step_bias.double())).exp()
        state = states[row].double() * fade[:, None, None]
        lacking = value.view(heads, width) - torch.einsum("hkw,hk->hw", state, key)
        state = state + torch.einsum("hk,hw->hkw", key, lacking * beta[row].sigmoid().double()[:, None])
        found = (torch.einsum("hkw,hk->hw", state, query) / key_width**0.5).to(BFLOAT16)
        normed = functional.rms_norm(found.double(), (width,), None, 1e-5).to(BFLOAT16) * norm
        return seen, state, normed.double() * functional.silu(gate[row].double())

    wanted = [rule(row) for row in range(rows)]
    shape = DeltaShape(
        *(each.data_ptr() for each in (conv, rate, step_bias, norm)), heads, key_heads, width, key_width, taps, 1e-5
    )

    def run(first: int, last: int, columns: list[torch.Tensor], states: list[torch.Tensor]) -> torch.Tensor:
        some = slice(first, last)
        kept = torch.tensor([[c.data_ptr(), s.data_ptr()] for c, s in zip(columns[some], states[some], strict=True)])
        room, out = torch.empty(channels), torch.empty(last - first, heads, width, dtype=BFLOAT16)
        given = (kept, mixed[some], gate[some], beta[some], step[some], room, out)
        kernels.delta(shape, last - first, *(each.data_ptr() for each in given))
        return out

    apart = [[each.clone() for each in of] for of in (columns, states)]
    out = run(0, rows, columns, states)
    for row, (seen, state, given_out) in enumerate(wanted):
        assert torch.equal(columns[row], seen)
        # A convolution that rounds to the neighbour moves one query, key or value by a last place.
        torch.testing.assert_close(states[row].double(), state, rtol=0.02, atol=0.02 * float(state.abs().max()))
        near = 0.03 * float(given_out.abs().max())
        assert float((out[row].double() - given_out).abs().median()) <= near + 1e-6
        assert torch.equal(run(row, row + 1, *apart)[0], out[row])  # rows are each other's business in no bit
        assert torch.equal(apart[1][row], states[row])
