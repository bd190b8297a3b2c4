"""Packed weights give what transformers' own modules give, and take the others' place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from meshnet_node import packed_linear
from meshnet_node.column_layout import lies_in_columns
from meshnet_node.packed_linear import PackedLinear, can_pack, laid_out, pack_linears

DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(not can_pack(dtype), reason=f"this CPU's torch packs no {dtype}"))
    for dtype in (torch.bfloat16, torch.float32)
]


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def linear(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(columns, rows, bias=bias, dtype=dtype).requires_grad_(requires_grad=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(300, 200), (129, 65), (64, 512)])
@pytest.mark.parametrize("count", [1, 2, 5, 16, 33, 256])
def test_a_packed_product_is_close_to_the_plain_one(
    shape: tuple[int, int], count: int, bias: bool, dtype: torch.dtype
) -> None:
    plain = linear(*shape, dtype, bias=bias)
    packed = PackedLinear(plain.weight, plain.bias)
    inputs = torch.randn(1, count, shape[1], dtype=dtype)
    torch.testing.assert_close(packed(inputs), plain(inputs))


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_with_gaps_between_rows_are_read_right(dtype: torch.dtype) -> None:
    plain = linear(300, 200, dtype)
    packed = PackedLinear(plain.weight, None)
    wide = torch.randn(1, 10, 400, dtype=dtype)
    for inputs in (wide[:, :, :200], wide[:, -1:, :200], wide[:, ::3, 100:300]):
        torch.testing.assert_close(packed(inputs), plain(inputs))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 64, dtype=torch.bfloat16)
        self.layers = nn.ModuleList([nn.Sequential(linear(256, 64), nn.SiLU(), linear(64, 256))])
        self.tiny = linear(4, 64)
        self.wide = linear(256, 256, torch.float32)
        self.sixteen = linear(256, 256, torch.float16)
        self.dt_proj = linear(256, 64)
        self.head = linear(512, 64)
        self.head.weight = self.embedding.weight
        self.requires_grad_(requires_grad=False)


def test_large_products_are_packed_where_the_cpu_has_their_dtype_and_no_others() -> None:
    model = Tied()
    pack_linears(model, keep=frozenset({"dt_proj"}))
    packed = {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    sixteen = {"layers.0.0", "layers.0.2"} if can_pack(torch.bfloat16) else set()
    assert packed == sixteen | ({"wide"} if can_pack(torch.float32) else set())
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matrix_that_looks_alike_in_any_order_tells_no_layout(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "_in_columns", {})  # what other tests have found out
    nothing, drawn = torch.zeros(128, 64, dtype=dtype), torch.randn(128, 64).to(dtype)
    assert lies_in_columns(laid_out(nothing), nothing) is None
    assert not PackedLinear(nothing, None).in_columns
    assert PackedLinear(drawn, None).in_columns is lies_in_columns(laid_out(drawn), drawn)
