"""Attention of chunks in C code: against double precision, and of the same bits however positions come in."""

from __future__ import annotations

import ctypes
import gc
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from meshnet_node.chunk_room import ChunkRoom
from meshnet_node.growing_cache import GrowingLayer
from meshnet_node.kernel_library import ChunkShape, ProductWay, StepKernels
from meshnet_node.native_chunk_attention import NativeChunkAttention
from meshnet_node.openmp import parallel_address
from native_compiler import needs_compiler

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_compiler]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
WAYS = {torch.float32: ProductWay.FLOATS, torch.bfloat16: ProductWay.WIDENED}
OF_EACH_DTYPE = pytest.mark.parametrize("dtype", list(WAYS))
WIDTHS = st.sampled_from([64, 128, 192, 256])
SCALING = 0.17


def session(
    chunk_kernels: StepKernels, dtype: torch.dtype, heads: int, key_heads: int, width: int, positions: int
) -> Tensors:
    """Queries, keys and values of all positions, as a product leaves them and as a cache holds them."""
    if WAYS[dtype] not in chunk_kernels.product_ways:
        pytest.skip("this CPU has no instructions for bfloat16")
    draw = torch.Generator().manual_seed(heads + width + positions)
    made = torch.randn(1, positions, heads + 2 * key_heads, width, generator=draw).to(dtype).transpose(1, 2)
    held = [torch.full((1, key_heads, positions + 20, width), float("nan"), dtype=dtype) for _ in range(2)]
    for room, new in zip(held, made[:, heads:].chunk(2, 1), strict=True):
        room[:, :, :positions] = new
    return made[:, :heads], held[0], held[1]


def cut(tensors: Tensors, start: int, stop: int) -> Tensors:
    """The frame of so many positions."""
    query, keys, values = tensors
    return query[:, :, start:stop], keys[:, :, :stop], values[:, :, :stop]


def causal(count: int, positions: int) -> torch.Tensor:
    return torch.ones(1, 1, count, positions, dtype=torch.bool).tril(positions - count)


def attended(chunk_kernels: StepKernels, frame: Tensors, threads: int = 1) -> torch.Tensor:
    """By the kernel itself, ``[count, heads, width]``; nothing may be written before what it gives, and behind."""
    query, keys, values = frame
    _, heads, count, width = query.shape
    key_heads, positions = keys.shape[1:3]
    found, room = torch.full((count + 2, heads, width), -7.0, dtype=query.dtype), ChunkRoom()
    addresses = (each.data_ptr() for each in (query, keys, values, found[1]))
    strides = (query.stride(2), query.stride(1), keys.stride(1), values.stride(1))
    shape = ChunkShape(*(*addresses, *strides, heads, key_heads, width, positions, count, WAYS[query.dtype], SCALING))
    needed = threads * chunk_kernels.chunk_room(width)
    at = room.at(needed + 64)
    behind = (ctypes.c_float * 64).from_address(at + 4 * needed)
    behind[:] = [3.0] * 64
    chunk_kernels.attend_chunk(shape, at, threads, parallel_address() if threads > 1 else None)
    assert set(behind) == {3.0}
    assert bool((found[[0, -1]] == -7).all())
    return found[1:-1]


def exact(frame: Tensors) -> torch.Tensor:
    query, keys, values = (each.double() for each in frame)
    mask = causal(query.shape[2], keys.shape[2])
    found = functional.scaled_dot_product_attention(query, keys, values, mask, scale=SCALING, enable_gqa=True)
    return found[0].transpose(0, 1)


def assert_near(found: torch.Tensor, frame: Tensors) -> None:
    near = 2**-8 if found.dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), exact(frame), rtol=near, atol=2e-5)


@OF_EACH_DTYPE
@settings(max_examples=40, deadline=None)
@given(
    key_heads=st.integers(1, 3),
    sharing=st.integers(1, 8),
    width=WIDTHS,
    count=st.integers(1, 120),
    before=st.integers(0, 600),
)
@torch.inference_mode()
def test_a_chunk_finds_what_double_precision_finds(
    chunk_kernels: StepKernels, dtype: torch.dtype, key_heads: int, sharing: int, width: int, count: int, before: int
) -> None:
    tensors = session(chunk_kernels, dtype, key_heads * sharing, key_heads, width, before + count)
    frame = cut(tensors, before, before + count)
    assert_near(attended(chunk_kernels, frame), frame)


@OF_EACH_DTYPE
@pytest.mark.parametrize("scale", [0.0, 1.0, 12.0])
@torch.inference_mode()
def test_scores_of_any_size_are_weighed(chunk_kernels: StepKernels, dtype: torch.dtype, scale: float) -> None:
    """From all alike to one that is worth all, greater from block to block, or smaller."""
    query, keys, values = session(chunk_kernels, dtype, 4, 2, 64, 700)
    grown = torch.linspace(0.1, 2.0, 720, dtype=dtype)[:, None]
    for each in (grown, grown.flip(0)):
        frame = cut((query * scale, keys * each, values), 560, 700)
        found, wanted = attended(chunk_kernels, frame).double(), exact(frame)
        torch.testing.assert_close(found, wanted, rtol=2**-8, atol=2e-4)  # scores of 500 are of 2**-15 themselves


@OF_EACH_DTYPE
@settings(max_examples=25, deadline=None)
@given(sharing=st.integers(1, 5), width=st.sampled_from([64, 128]), data=st.data())
@torch.inference_mode()
def test_a_position_gets_the_same_bits_in_any_chunk(
    chunk_kernels: StepKernels, dtype: torch.dtype, sharing: int, width: int, data: st.DataObject
) -> None:
    positions = data.draw(st.integers(2, 330))
    tensors = session(chunk_kernels, dtype, 2 * sharing, 2, width, positions)
    whole = attended(chunk_kernels, cut(tensors, 0, positions))
    cuts = sorted({0, positions, *data.draw(st.lists(st.integers(1, positions - 1), max_size=4))})
    apart = [attended(chunk_kernels, cut(tensors, *ends)) for ends in pairwise(cuts)]
    assert torch.equal(torch.cat(apart), whole)


@OF_EACH_DTYPE
@torch.inference_mode()
def test_one_position_after_another_gets_the_same_bits(chunk_kernels: StepKernels, dtype: torch.dtype) -> None:
    tensors = session(chunk_kernels, dtype, 3, 1, 64, 300)
    whole = attended(chunk_kernels, cut(tensors, 0, 300))
    for chunk in ((100, 200), (200, 100), (1,) * 300):
        ends = torch.tensor((0, *chunk)).cumsum(0).tolist()
        apart = [attended(chunk_kernels, cut(tensors, *each)) for each in pairwise(ends)]
        assert torch.equal(torch.cat(apart), whole)
    assert_near(whole, cut(tensors, 0, 300))


@OF_EACH_DTYPE
@pytest.mark.parametrize(("heads", "key_heads"), [(8, 1), (8, 8), (6, 3)])
@torch.inference_mode()
def test_threads_change_no_bit(chunk_kernels: StepKernels, dtype: torch.dtype, heads: int, key_heads: int) -> None:
    if parallel_address() is None:
        pytest.skip("torch's OpenMP is not GNU's")
    tensors = session(chunk_kernels, dtype, heads, key_heads, 64, 300)
    for start in (0, 200, 298):
        alone = attended(chunk_kernels, cut(tensors, start, 300))
        for threads in (2, 3, 7):
            assert torch.equal(attended(chunk_kernels, cut(tensors, start, 300), threads), alone)


@torch.inference_mode()
def test_what_comes_after_weighs_nothing_at_all(chunk_kernels: StepKernels) -> None:
    query, keys, values = session(chunk_kernels, torch.float32, 6, 2, 64, 290)
    found = attended(chunk_kernels, cut((query, keys, values), 180, 290))
    later = keys.clone(), values.clone()
    for each in later:
        each[:, :, 250:] *= 100
    again = attended(chunk_kernels, cut((query, *later), 180, 290))
    assert torch.equal(again[:70], found[:70])
    assert not bool((again[70:] == found[70:]).any(-1).all(-1).any())


@OF_EACH_DTYPE
@torch.inference_mode()
def test_frames_of_a_session_go_by_the_kernel(chunk_kernels: StepKernels, dtype: torch.dtype) -> None:
    """Keys and values as the cache holds them, in a room whose spare rows hold what is no number."""
    query, keys, values = session(chunk_kernels, dtype, 6, 2, 64, 200)
    native, slot, start = NativeChunkAttention(chunk_kernels, ChunkRoom()), GrowingLayer(), 0
    for count in (90, 80, 30):
        stop = start + count
        held = slot.update(keys[:, :, start:stop], values[:, :, start:stop])
        for each, room in zip(held, (slot._key_room, slot._value_room), strict=True):
            assert room._held is not None
            room._held[:, :, each.shape[2] :] = float("nan")
        frame = (query[:, :, start:stop], *held)
        assert not frame[0].is_contiguous()
        found = native.attend(*frame, causal(count, stop) if start else None, SCALING)
        assert found is not None
        assert found.shape == (1, count, 6, 64)
        assert found.is_contiguous()
        assert_near(found[0], cut((query, keys, values), start, stop))
        start = stop


def asked(chunk_kernels: StepKernels, frame: Tensors, mask: torch.Tensor | None) -> torch.Tensor | None:
    return NativeChunkAttention(chunk_kernels, ChunkRoom()).attend(*frame, mask, SCALING)


@torch.inference_mode()
def test_masks_that_hide_more_or_less_are_refused(chunk_kernels: StepKernels) -> None:
    frame, mask = cut(session(chunk_kernels, torch.float32, 4, 2, 64, 90), 60, 90), causal(30, 90)
    assert asked(chunk_kernels, frame, mask) is not None
    refused = {"window": mask.triu(60 - 50), "one more": mask.clone(), "one less": mask.clone(), "padded": mask.clone()}
    refused["one more"][0, 0, 3, 60 + 4] = True
    refused["one less"][0, 0, 29, 89] = False
    refused["padded"][..., 0] = False
    refused["another dtype"] = torch.zeros(1, 1, 30, 90).masked_fill(~mask, float("-inf"))
    refused["of each head"] = mask.expand(1, 4, 30, 90)
    refused["of fewer"] = mask[..., 1:]
    assert not [name for name, each in refused.items() if asked(chunk_kernels, frame, each) is not None]
    assert asked(chunk_kernels, frame, None) is None  # which positions they would see, nobody said
    first = cut(session(chunk_kernels, torch.float32, 4, 2, 64, 90), 0, 90)
    assert asked(chunk_kernels, first, None) is not None
    assert asked(chunk_kernels, first, causal(90, 90)) is not None


@torch.inference_mode()
def test_a_mask_is_looked_at_once_for_all_layers(chunk_kernels: StepKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    frame, mask = cut(session(chunk_kernels, torch.float32, 4, 2, 64, 90), 60, 90), causal(30, 90)
    native, own = NativeChunkAttention(chunk_kernels, ChunkRoom()), torch.equal
    looks: list[torch.Tensor] = []

    def noting(seen: torch.Tensor, wanted: torch.Tensor) -> bool:
        looks.append(seen)
        return own(seen, wanted)

    monkeypatch.setattr(torch, "equal", noting)
    for _ in range(3):
        assert native.attend(*frame, mask, SCALING) is not None
    assert len(looks) == 1
    assert native.attend(*frame, mask.triu(20), SCALING) is None
    del mask
    gc.collect()
    assert native.attend(*frame, causal(30, 90).triu(20), SCALING) is None


@torch.inference_mode()
def test_other_forms_are_refused(chunk_kernels: StepKernels) -> None:
    query, key, value = cut(session(chunk_kernels, torch.float32, 4, 2, 64, 90), 0, 90)
    refused: dict[str, Tensors] = {
        "narrow": (query[..., :32], key[..., :32].contiguous(), value[..., :32].contiguous()),
        "wide": tuple(torch.randn(1, heads, 90, 320) for heads in (4, 2, 2)),  # type: ignore[dict-item]
        "two": (query.expand(2, -1, -1, -1), key.expand(2, -1, -1, -1), value.expand(2, -1, -1, -1)),
        "dtype": (query.double(), key.double(), value.double()),
        "mixed": (query, key.bfloat16(), value),
        "heads": (query[:, :3], key, value),
        "values": (query, key, value[..., :32].contiguous()),
        "fewer": (query, key, value[:, :, :89]),
        "apart": (query, key.transpose(1, 2).contiguous().transpose(1, 2), value),
        "turned": (query.transpose(2, 3).contiguous().transpose(2, 3), key, value),
        "sharing": (query[:, :1].expand(-1, 130, -1, -1), key, value),
    }
    assert asked(chunk_kernels, (query, key, value), None) is not None
    assert not [name for name, frame in refused.items() if asked(chunk_kernels, frame, None) is not None]
