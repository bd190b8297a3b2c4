"""Quick layers against transformers' own, of every family that has them; and what makes a layer none."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from meshnet_core.layer_range import LayerRange
from meshnet_node.family_support import FAMILIES
from meshnet_node.joined_linear import BesideLinears, joined
from meshnet_node.layer_slicing import base_of
from meshnet_node.layer_view import ForwardCancelledError, LayerView
from meshnet_node.packed_linear import can_pack
from meshnet_node.packed_matrix import PackedMatrix
from meshnet_node.quantised_layers import QuantisedLinear
from meshnet_node.quick_layer import QuickLayer, QuickMlp, are_quick, quicken
from meshnet_node.shard_loader import plan_shard
from meshnet_node.weight_rounding import rounded
from tiny_models import VOCAB, num_layers, save_tiny

QUICK = [name for name, family in FAMILIES.items() if family.quick]
FRAMES = (20, 7, 1, 1, 3, 1)  # prefill in two chunks, steps, and drafts between them


@pytest.fixture
def views(tmp_path: Path) -> Callable[..., tuple[LayerView, LayerView]]:
    def load(family: str, dtype: str, **settings: object) -> tuple[LayerView, LayerView]:
        """The same whole model, as transformers has it and as a shard does."""
        folder = save_tiny(family, tmp_path / family, **settings)
        layers = LayerRange(0, num_layers(family))
        plan = plan_shard(folder, layers, dtype=dtype, device="cpu")
        shard = plan.load()
        return LayerView(plan.load_model(), layers, 0, FAMILIES[family]), shard._view(0)

    return load


@torch.inference_mode()
def run(view: LayerView, frames: tuple[int, ...] = FRAMES) -> list[torch.Tensor]:
    """Logits of each frame of one session, and of one run without a cache."""
    generator, cache, position = torch.Generator().manual_seed(1), view.new_cache(), 0
    logits = []
    for count in frames:
        ids = torch.randint(3, VOCAB, (1, count), generator=generator)
        logits.append(view.forward(ids, position=position, cache=cache, sample=count, cancelled=lambda: False))
        position += count
    return [*logits, view.forward(ids, position=0, cache=None, sample=1, cancelled=lambda: False)]


@pytest.mark.parametrize("family", QUICK)
def test_the_logits_are_those_of_transformers_own_layers(
    family: str, views: Callable[..., tuple[LayerView, LayerView]]
) -> None:
    for dtype in ("float32", "bfloat16"):
        plain, quick = views(family, dtype)
        assert not are_quick(base_of(plain.model))
        assert are_quick(base_of(quick.model))
        for own, ours in zip(run(plain), run(quick), strict=True):
            if dtype == "bfloat16" and can_pack():
                assert torch.equal(own, ours)
            else:  # products of joined weights may add up in another order
                torch.testing.assert_close(own, ours, rtol=0, atol=1e-5 if dtype == "float32" else 0.05)


def test_biases_in_every_product_are_kept(views: Callable[..., tuple[LayerView, LayerView]]) -> None:
    plain, quick = views("llama", "float32", attention_bias=True, mlp_bias=True)
    for model in (plain.model, quick.model):
        names = [name for name, _ in model.named_parameters() if name.endswith("bias")]
        assert names
    for own, ours in zip(run(plain), run(quick), strict=True):
        torch.testing.assert_close(own, ours, rtol=0, atol=1e-5)


def test_a_layer_with_something_unknown_in_it_stays_as_it_is(views: Callable[..., tuple[LayerView, LayerView]]) -> None:
    plain, _ = views("llama", "float32")
    base = base_of(plain.model)
    base.layers[1].self_attn.gate = nn.Identity()
    quicken(base, "sdpa")
    assert not any(isinstance(layer, QuickLayer) for layer in base.layers)


def test_layers_that_attend_otherwise_stay_as_they_are(views: Callable[..., tuple[LayerView, LayerView]]) -> None:
    plain, _ = views("llama", "float32")
    quicken(base_of(plain.model), "eager")
    assert not are_quick(base_of(plain.model))


def test_a_layers_own_weights_are_let_go_of_before_the_next_layer_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = LayerRange(0, num_layers("llama"))
    base = base_of(plan_shard(save_tiny("llama", tmp_path), layers, dtype="float32", device="cpu").load_model())
    weights = [weakref.ref(layer.mlp.gate_proj.weight) for layer in base.layers]
    held = []

    def look(layer: nn.Module) -> QuickLayer:
        gc.collect()
        held.append(sum(weight() is not None for weight in weights))
        return QuickLayer(layer)

    monkeypatch.setattr("meshnet_node.quick_layer.QuickLayer", look)
    quicken(base, "sdpa")
    assert held == list(range(len(weights), 0, -1))


def test_experts_stay_and_a_gated_mlp_does_not(views: Callable[..., tuple[LayerView, LayerView]]) -> None:
    _, mixture = views("mixtral", "float32")
    _, dense = views("llama", "float32")
    assert not any(isinstance(layer.mlp, QuickMlp) for layer in base_of(mixture.model).layers)
    assert all(isinstance(layer.mlp, QuickMlp) for layer in base_of(dense.model).layers)


def test_a_cancel_is_looked_at_before_every_layer(views: Callable[..., tuple[LayerView, LayerView]]) -> None:
    _, quick = views("llama", "float32")
    looks = 0

    def at_the_third() -> bool:
        nonlocal looks
        looks += 1
        return looks == 3

    with pytest.raises(ForwardCancelledError), torch.inference_mode():
        quick.forward(
            torch.ones(1, 1, dtype=torch.int64), position=0, cache=quick.new_cache(), sample=1, cancelled=at_the_third
        )
    assert looks == 3


def test_a_shard_that_is_closed_lets_go_of_joined_weights(tmp_path: Path) -> None:
    shard = plan_shard(save_tiny("llama", tmp_path), LayerRange(0, 4), dtype="float32", device="cpu").load()
    weight = base_of(shard._model).layers[0].self_attn.qkv_proj.weight
    seen = weakref.ref(weight.untyped_storage())
    held = weakref.ref(weight)
    del weight
    shard.close()
    gc.collect()
    assert held() is None
    assert seen() is None


def linear(rows: int, bias: bool) -> nn.Linear:
    return nn.Linear(64, rows, bias=bias).requires_grad_(requires_grad=False)


@pytest.mark.parametrize("biases", [(False, False), (True, True), (True, False)])
def test_joined_linears_give_what_their_parts_give(biases: tuple[bool, bool]) -> None:
    parts = [linear(rows, bias) for rows, bias in zip((32, 17), biases, strict=True)]
    inputs = torch.randn(3, 5, 64)
    apart = torch.cat([part(inputs) for part in parts], dim=-1)
    whole = joined(parts)
    assert type(whole) is nn.Linear
    assert (whole.bias is not None) == any(biases)
    torch.testing.assert_close(whole(inputs), apart, rtol=0, atol=1e-6)
    assert not any(list(part.parameters()) for part in parts)


def quantised(rows: int, planes: int = 1, *, bias: bool = False) -> QuantisedLinear:
    matrix = PackedMatrix(rows, 64, planes)
    matrix.fill(0, rounded(torch.randn(rows, 64), planes))
    return QuantisedLinear(matrix, torch.randn(rows, dtype=torch.bfloat16) if bias else None)


@pytest.mark.parametrize("bias", [False, True])
def test_packed_matrices_that_fill_their_blocks_are_joined(bias: bool) -> None:
    parts = [quantised(64, bias=bias), quantised(128), quantised(40)]
    inputs = torch.randn(2, 3, 64, dtype=torch.bfloat16)
    apart = torch.cat([part(inputs) for part in parts], dim=-1)
    whole = joined(parts)
    assert type(whole) is QuantisedLinear
    assert torch.equal(whole(inputs), apart)
    assert not any(list(part.buffers()) for part in parts)


@pytest.mark.parametrize(
    "parts",
    [
        [quantised(40), quantised(64)],
        [quantised(64), quantised(64, 2)],
        [quantised(64), linear(64, bias=False).bfloat16()],
    ],
)
def test_what_cannot_be_joined_is_called_one_after_the_other(parts: list[nn.Module]) -> None:
    inputs = torch.randn(2, 3, 64, dtype=torch.bfloat16)
    whole = joined(parts)
    assert type(whole) is BesideLinears
    assert torch.equal(whole(inputs), torch.cat([part(inputs) for part in parts], dim=-1))
