"""The C code of a step's attention, against double precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from meshnet_node.kernel_library import ATTENDED, AttentionShape, StepKernels
from meshnet_node.openmp import parallel_address
from native_compiler import needs_compiler
from native_kernels import drawn

BFLOAT16 = torch.bfloat16


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from((2, 24, 64, 80, 128, 192)),
    st.integers(1, 600),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1000),
)
def test_attention_is_that_of_double_precision(
    kernels: StepKernels,
    key_heads: int,
    sharing: int,
    width: int,
    positions: int,
    normed: bool,
    turned: bool,
    seed: int,
) -> None:
    heads = key_heads * sharing
    projected = torch.randn(heads + 2 * key_heads, width, generator=torch.Generator().manual_seed(seed)).to(BFLOAT16)
    keys, values = (drawn(seed + each, key_heads, positions + 2, width).clamp(-3, 3) for each in (1, 2))
    norm = drawn(seed + 3, heads + key_heads, width).clamp(-1, 1)
    angles = torch.randn(width // 2, generator=torch.Generator().manual_seed(seed + 4))
    cosines, sines = angles.cos().repeat(2).to(BFLOAT16), torch.cat([-angles.sin(), angles.sin()]).to(BFLOAT16)
    asked = projected.clone()
    turning = asked[: heads + key_heads]
    if normed:
        turning = functional.rms_norm(turning, (width,), None, 1e-6) * norm
    if turned:
        turning = (turning * cosines) + turning.roll(width // 2, -1) * sines
    query, key, value = turning[:heads], turning[heads:], asked[heads + key_heads :]
    past = [each.clone() for each in (keys, values)]
    past[0][:, positions - 1], past[1][:, positions - 1] = key, value
    expected = functional.scaled_dot_product_attention(
        query.double().view(1, heads, 1, width),
        *(each[:, :positions].double().repeat_interleave(sharing, 0).unsqueeze(0) for each in past),
        scale=0.2,
    ).view(heads, width)

    found, room = (
        torch.empty(heads, width, dtype=BFLOAT16),
        torch.empty(-(-positions // ATTENDED) * heads * (width + 2)),
    )
    shape = AttentionShape(norm.data_ptr() if normed else None, heads, key_heads, width, turned, 0.2, 1e-6)
    kernels.attend(
        *(shape, projected.data_ptr(), cosines.data_ptr(), sines.data_ptr(), keys.data_ptr(), values.data_ptr()),
        *(keys.stride(0), values.stride(0), positions, room.data_ptr(), found.data_ptr(), 1, None),
    )
    # A norm that rounds to the neighbour moves one query or key by a last place.
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(keys.float(), past[0].float(), rtol=2**-6, atol=2**-6)
    assert torch.equal(values, past[1])


@needs_compiler
@pytest.mark.parametrize("positions", [1, 256, 257, 1100])
def test_attention_is_the_same_bits_whoever_takes_its_blocks(kernels: StepKernels, positions: int) -> None:
    if (address := parallel_address()) is None:
        pytest.skip("torch's OpenMP is not GNU's")
    shape = AttentionShape(None, 10, 2, 64, 0, 0.2, 0.0)
    keys, values = (drawn(seed, 2, positions, 64).clamp(-3, 3) for seed in (1, 2))
    room = torch.full((-(-positions // ATTENDED) * 10 * 66,), float("nan"))

    def attended(threads: int) -> torch.Tensor:
        projected, found = drawn(3, 14, 64).clamp(-3, 3), torch.empty(10, 64, dtype=BFLOAT16)
        kernels.attend_long(
            *(shape, projected.data_ptr(), None, None, keys.data_ptr(), values.data_ptr()),
            *(keys.stride(0), values.stride(0), positions, room.data_ptr(), found.data_ptr()),
            *(threads, address if threads > 1 else None),
        )
        return found

    alone = attended(1)
    assert alone.isfinite().all()
    for threads in (2, 3, 7):
        assert torch.equal(attended(threads), alone)


@needs_compiler
@pytest.mark.parametrize("width", [64, 80])
@pytest.mark.parametrize("largest", [3, 280, 299])
def test_a_score_far_above_the_others_is_all_that_counts(kernels: StepKernels, width: int, largest: int) -> None:
    shape = AttentionShape(None, 1, 1, width, 0, 1.0, 0.0)
    projected, keys, values = torch.ones(3, width).to(BFLOAT16), drawn(1, 1, 300, width), drawn(2, 1, 300, width)
    keys.clamp_(-1, 1)
    keys[0, largest], projected[1] = 1e4, keys[0, 299] if largest < 299 else 1e4
    found, room = torch.empty(1, width, dtype=BFLOAT16), torch.empty(2 * (width + 2))
    addresses = (projected.data_ptr(), None, None, keys.data_ptr(), values.data_ptr())
    kernels.attend(shape, *addresses, 300 * width, 300 * width, 300, room.data_ptr(), found.data_ptr(), 1, None)
    assert torch.equal(found[0], values[0, largest])


@needs_compiler
@pytest.mark.parametrize("width", [64, 80])
@pytest.mark.parametrize("hidden", [slice(0, 256), slice(256, 300), slice(0, 299)])
def test_a_block_of_which_nothing_counts_leaves_the_others(kernels: StepKernels, width: int, hidden: slice) -> None:
    """Scores beyond the range of float32 are what masks are, elsewhere."""
    shape = AttentionShape(None, 1, 1, width, 0, 1.0, 0.0)
    projected, keys, values = torch.ones(3, width).to(BFLOAT16), drawn(1, 1, 300, width), drawn(2, 1, 300, width)
    keys.clamp_(-1, 1)
    projected[1] = keys[0, 299]  # the newest position's own
    if hidden.stop == 300:
        projected[1] = -3e38
    keys[0, hidden] = -3e38
    past = [each.clone() for each in (keys, values)]
    past[0][0, 299], past[1][0, 299] = projected[1], projected[2]
    wanted = functional.scaled_dot_product_attention(
        projected[:1].float()[None, None], past[0].float()[None], past[1].float()[None], scale=1.0
    )
    found, room = torch.empty(1, width, dtype=BFLOAT16), torch.empty(2 * (width + 2))
    addresses = (projected.data_ptr(), None, None, keys.data_ptr(), values.data_ptr())
    kernels.attend(shape, *addresses, 300 * width, 300 * width, 300, room.data_ptr(), found.data_ptr(), 1, None)
    assert wanted.isfinite().all()
    torch.testing.assert_close(found[0].float(), wanted[0, 0, 0], rtol=0.02, atol=0.02)


@needs_compiler
@pytest.mark.parametrize("width", [64, 80])
def test_what_is_no_number_spoils_its_own_head_alone(kernels: StepKernels, width: int) -> None:
    shape = AttentionShape(None, 2, 2, width, 0, 0.2, 0.0)
    projected, keys, values = drawn(0, 6, width), drawn(1, 2, 300, width), drawn(2, 2, 300, width)
    keys[1, 5, 0] = float("nan")
    found, room = torch.empty(2, width, dtype=BFLOAT16), torch.empty(2 * 2 * (width + 2))
    addresses = (projected.data_ptr(), None, None, keys.data_ptr(), values.data_ptr())
    strides = (keys.stride(0), values.stride(0))
    kernels.attend(shape, *addresses, *strides, 300, room.data_ptr(), found.data_ptr(), 1, None)
    assert found[0].isfinite().all()
    assert found[1].isnan().all()


@needs_compiler
def test_without_a_place_for_it_attention_is_left_out(kernels: StepKernels) -> None:
    shape = AttentionShape(None, 2, 1, 8, 0, 1.0, 0.0)
    projected, keys, values = drawn(0, 4, 8), torch.zeros(1, 3, 8).to(BFLOAT16), torch.zeros(1, 3, 8).to(BFLOAT16)
    addresses = (projected.data_ptr(), None, None, keys.data_ptr(), values.data_ptr())
    kernels.attend(shape, *addresses, keys.stride(0), values.stride(0), 3, None, None, 1, None)
    assert torch.equal(keys[0, 2], projected[2])
    assert torch.equal(values[0, 2], projected[3])
    assert not keys[0, :2].any()
