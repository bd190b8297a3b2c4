"""Packed weights give the bits that transformers' own modules give, and take the others' place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from in_process_mesh import random_prompt
from meshnet_core.layer_range import LayerRange
from meshnet_node import packed_linear
from meshnet_node.packed_linear import PackedLinear, can_pack, pack_linears
from meshnet_node.shard_loader import load_shard
from shard_routes import Models, Route
from tiny_models import CORE, FAMILIES, num_layers

pytestmark = pytest.mark.skipif(not can_pack(), reason="this CPU's torch packs no bfloat16 weights")


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def linear(rows: int, columns: int, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(columns, rows, bias=bias, dtype=torch.bfloat16).requires_grad_(requires_grad=False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(300, 200), (129, 65), (64, 512)])
@pytest.mark.parametrize("count", [1, 2, 5, 16, 33, 256])
def test_a_packed_product_is_close_to_the_plain_one(shape: tuple[int, int], count: int, bias: bool) -> None:
    plain = linear(*shape, bias=bias)
    packed = PackedLinear(plain.weight, plain.bias)
    inputs = torch.randn(1, count, shape[1], dtype=torch.bfloat16)
    torch.testing.assert_close(packed(inputs), plain(inputs))


def test_inputs_with_gaps_between_rows_are_read_right() -> None:
    plain = linear(300, 200)
    packed = PackedLinear(plain.weight, None)
    wide = torch.randn(1, 10, 400, dtype=torch.bfloat16)
    for inputs in (wide[:, :, :200], wide[:, -1:, :200], wide[:, ::3, 100:300]):
        torch.testing.assert_close(packed(inputs), plain(inputs))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 64, dtype=torch.bfloat16)
        self.layers = nn.ModuleList([nn.Sequential(linear(256, 64), nn.SiLU(), linear(64, 256))])
        self.tiny = linear(4, 64)
        self.wide = nn.Linear(256, 256, dtype=torch.float32)
        self.dt_proj = linear(256, 64)
        self.head = linear(512, 64)
        self.head.weight = self.embedding.weight
        self.requires_grad_(requires_grad=False)


def test_large_bfloat16_products_are_packed_and_no_others() -> None:
    model = Tied()
    pack_linears(model, keep=frozenset({"dt_proj"}))
    packed = {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert packed == {"layers.0.0", "layers.0.2"}
    assert model.head.weight is model.embedding.weight


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("tiny"))


def logits_of(models: Models, family: str) -> tuple[torch.Tensor, int]:
    """Of a prompt in chunks and some steps, in bfloat16; and how many matrices were packed."""
    layers = num_layers(family)
    shard = load_shard(models.folder(family), LayerRange(0, layers), dtype="bfloat16", device="cpu")
    route, ids = Route([(shard, 0)]), random_prompt(16)
    states = route.open()
    logits = torch.cat([route.prefill(ids[:12], states), route.decode(ids[12:], 12, states)])
    assert shard.weight_bytes > 0
    return logits, sum(isinstance(module, PackedLinear) for module in shard._model.modules())


def check_family(models: Models, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "_LEAST_ELEMENTS", 1)
    packed, count = logits_of(models, family)
    assert count >= num_layers(family)
    monkeypatch.setattr(packed_linear, "can_pack", lambda: False)
    plain, count = logits_of(models, family)
    assert count == 0
    torch.testing.assert_close(packed, plain, rtol=0.1, atol=0.1)  # rounding; most have the same bits


@pytest.mark.parametrize("family", CORE)
def test_a_family_computes_the_same_with_packed_weights(
    models: Models, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_family(models, family, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(CORE)))
def test_so_does_every_other_family(models: Models, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_family(models, family, monkeypatch)
