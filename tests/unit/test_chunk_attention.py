"""Attention of chunks by plain products: what torch's kernel finds, in every form a chunk comes in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from meshnet_node import chunk_attention, cpu_attention
from meshnet_node.chunk_attention import attend_chunk, block_queries, suits
from meshnet_node.cpu_attention import attend

pytestmark = pytest.mark.usefixtures("one_thread")
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Attention(torch.nn.Module):
    def __init__(self, sharing: int, *, is_causal: bool = True) -> None:
        super().__init__()
        self.num_key_value_groups = sharing
        self.is_causal = is_causal


def chunk(sharing: int, count: int, before: int, *, batch: int = 1, width: int = 16, value_width: int = 16) -> Tensors:
    """Queries of two groups of heads, a layer's view of them; keys and values with room behind them, as caches hold."""
    draw = torch.Generator().manual_seed(sharing + 10 * count + 1000 * before)
    positions = before + count
    query = torch.randn(batch, count, 2 * sharing, width, generator=draw).bfloat16().transpose(1, 2)
    key = torch.randn(batch, 2, positions + 3, width, generator=draw).bfloat16()[:, :, :positions]
    value = torch.randn(batch, 2, positions + 3, value_width, generator=draw).bfloat16()[:, :, :positions]
    return query, key, value


def exact(tensors: Tensors, mask: torch.Tensor | None, scaling: float) -> torch.Tensor:
    """In double precision, ``[batch, count, heads, value_width]``."""
    query, key, value = (tensor.double() for tensor in tensors)
    found = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return found.transpose(1, 2)


def behind(count: int, before: int, *, window: int | None = None) -> torch.Tensor:
    """``[1, 1, count, before + count]``: what each of the newest positions sees."""
    seen = torch.ones(1, 1, count, before + count, dtype=torch.bool).tril(before)
    return seen if window is None else seen.triu(before - window)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of queries, and groups of heads one by one."""
    monkeypatch.setattr(chunk_attention, "_ROWS", 16)
    monkeypatch.setattr(chunk_attention, "_GROUPED", 1)


@pytest.mark.parametrize("blocks", ["as they are", "small"])
@settings(max_examples=40, deadline=None)
@given(
    sharing=st.sampled_from([1, 3, 7]),
    count=st.integers(1, 70),
    before=st.integers(0, 90),
    window=st.none() | st.integers(1, 50),
    batch=st.integers(1, 2),
    value_width=st.sampled_from([8, 16]),
)
@torch.inference_mode()
def test_a_chunk_finds_what_double_precision_finds(
    blocks: str, sharing: int, count: int, before: int, window: int | None, batch: int, value_width: int
) -> None:
    tensors = chunk(sharing, count, before, batch=batch, value_width=value_width)
    mask = behind(count, before, window=window)
    with pytest.MonkeyPatch.context() as patch:
        if blocks == "small":
            patch.setattr(chunk_attention, "_ROWS", 16)
            patch.setattr(chunk_attention, "_GROUPED", 1)
        found = attend_chunk(*tensors, mask, 0.1)
    assert found.is_contiguous()
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), exact(tensors, mask, 0.1), rtol=0.02, atol=0.02)


@torch.inference_mode()
def test_the_first_chunk_needs_no_mask(small_blocks: None) -> None:
    tensors = chunk(3, 50, 0)
    assert torch.equal(attend_chunk(*tensors, None, 0.3), attend_chunk(*tensors, behind(50, 0), 0.3))


@torch.inference_mode()
def test_what_is_hidden_weighs_nothing_at_all(small_blocks: None) -> None:
    query, key, value = chunk(3, 40, 20)
    found = attend_chunk(query, key, value, behind(40, 20), 0.3)
    later = value.clone()
    later[:, :, 20 + 25 :] = 1e30  # positions from the 25th of the chunk on
    again = attend_chunk(query, key, later, behind(40, 20), 0.3)
    assert torch.equal(found[:, :25], again[:, :25])
    assert not torch.equal(found[:, 25:], again[:, 25:])


@torch.inference_mode()
def test_a_mask_of_each_row_of_a_batch_counts(small_blocks: None) -> None:
    tensors = chunk(2, 20, 12, batch=2)
    masks = torch.cat([behind(20, 12), behind(20, 12, window=5)])
    torch.testing.assert_close(
        attend_chunk(*tensors, masks, 0.1).double(), exact(tensors, masks, 0.1), rtol=0.02, atol=0.02
    )


@given(sharing=st.integers(1, 64), positions=st.integers(1, 1 << 20))
def test_blocks_stay_in_bounds(sharing: int, positions: int) -> None:
    queries = block_queries(sharing, positions)
    least = chunk_attention._QUERY_STEP
    assert queries % least == 0
    assert queries == least or sharing * (queries - least) * positions < chunk_attention._LARGEST
    assert sharing * (queries - least) < chunk_attention._ROWS


def attended(monkeypatch: pytest.MonkeyPatch, *arguments: Any, native: bool = True, **options: Any) -> list[str]:
    """Which of the two ways a call of ``attend`` went; what came out is compared with transformers' own."""
    ways: list[str] = []
    own = attend_chunk

    def by_products(*given: Any) -> torch.Tensor:
        ways.append("products")
        return own(*given)

    monkeypatch.setattr(cpu_attention, "_products_gain", lambda: native)
    monkeypatch.setattr(chunk_attention, "attend_chunk", by_products)
    mine, _ = attend(*arguments, **options)
    theirs, _ = sdpa_attention_forward(*arguments, **options)
    torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.03)
    return ways


@pytest.mark.parametrize(("count", "before"), [(60, 80), (128, 0)])
@pytest.mark.parametrize("scaling", [None, 0.2])
@torch.inference_mode()
def test_long_chunks_go_by_products(
    count: int, before: int, scaling: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = behind(count, before) if before else None
    assert attended(monkeypatch, Attention(2), *chunk(2, count, before), mask, scaling=scaling) == ["products"]


@torch.inference_mode()
def test_all_else_goes_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    long = chunk(2, 60, 80)
    assert attended(monkeypatch, Attention(2), *long, behind(60, 80), native=False) == []
    assert attended(monkeypatch, Attention(2), *long, behind(60, 80), is_causal=False) == ["products"]  # as masked
    added = torch.zeros(1, 1, 60, 140).bfloat16().masked_fill(~behind(60, 80), float("-inf"))
    assert attended(monkeypatch, Attention(2), *long, added) == []
    assert attended(monkeypatch, Attention(2), *chunk(2, 8, 200), behind(8, 200)) == []  # too short to gain
    assert attended(monkeypatch, Attention(2), *chunk(2, 60, 0), None) == []
    in_float32 = tuple(tensor.float() for tensor in long)
    assert attended(monkeypatch, Attention(2), *in_float32, behind(60, 80)) == []
    assert attended(monkeypatch, Attention(2, is_causal=False), *chunk(2, 128, 0), None) == []


@torch.inference_mode()
def test_a_modules_own_way_of_chunks_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = chunk(2, 60, 80)
    mask, module, marked = behind(60, 80), Attention(2), torch.zeros(1)
    asked: list[tuple[Any, ...]] = []

    def of_chunk(*given: Any) -> torch.Tensor | None:
        asked.append(given)
        return marked

    monkeypatch.setattr(module, "of_chunk", of_chunk, raising=False)
    for scaling, factor in ((None, 16**-0.5), (0.2, 0.2)):
        assert attend(module, query, key, value, mask, scaling=scaling)[0] is marked
        assert asked.pop() == (query, key, value, mask, factor)
    assert attend(module, *chunk(2, 128, 0), None)[0] is marked
    others: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((*chunk(2, 1, 80), None), {}),
        ((*chunk(2, 60, 80), mask), {"dropout": 1e-9}),
        ((*chunk(2, 128, 0), None), {"is_causal": False}),
    ]
    asked.clear()
    for arguments, options in others:
        attend(module, *arguments, **options)
    assert not asked
    monkeypatch.setattr(module, "of_chunk", lambda *_: None)
    assert attended(monkeypatch, module, query, key, value, mask) == ["products"]


def test_what_it_takes_is_said() -> None:
    query, key, _ = chunk(2, 60, 80)
    assert suits(query, key, behind(60, 80))
    assert not suits(query, key, None)  # which positions it would see, nobody said
    assert not suits(query, key, behind(60, 80).expand(1, 4, 60, 140))
