"""Experts whose weights are laid out give what transformers' grouped products give, and take the others' place."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshnet_core.layer_range import LayerRange
from meshnet_node import packed_linear
from meshnet_node.laid_out_experts import LaidOutExperts, lay_out_experts
from meshnet_node.layer_slicing import base_of
from meshnet_node.packed_linear import can_pack
from meshnet_node.shard_loader import load_shard, plan_shard
from tiny_models import num_layers, save_tiny

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not can_pack(), reason="this CPU's torch packs no bfloat16"),
]
MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"]


@pytest.fixture(autouse=True)
def _every_size_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "_LEAST_ELEMENTS", 1)


def experts_of(family: str, folder: Path, dtype: str) -> list[Any]:
    """transformers' modules of experts, filled."""
    save_tiny(family, folder)
    plan = plan_shard(folder, LayerRange(0, num_layers(family)), dtype=dtype, device="cpu")
    model = plan.load_model()
    return [module for module in model.modules() if hasattr(module, "gate_up_proj") and hasattr(module, "act_fn")]


def positions(count: int, experts: Any, dtype: torch.dtype, *, none: bool = False) -> tuple[torch.Tensor, ...]:
    """Hidden states, chosen experts and weights; with ``none`` some are the number that stands for no expert."""
    generator = torch.Generator().manual_seed(count)
    number, _, hidden = experts.gate_up_proj.shape
    chosen = torch.stack([torch.randperm(number + none, generator=generator)[:2] for _ in range(count)])
    weights = torch.rand(count, 2, generator=generator).to(dtype)
    return torch.randn(count, hidden, generator=generator).to(dtype), chosen, weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", MIXTURES)
@torch.inference_mode()
def test_they_give_what_the_grouped_products_give(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    found = experts_of(family, tmp_path / family, str(dtype).removeprefix("torch."))
    assert found
    for experts in found:
        experts.config._experts_implementation = "grouped_mm"
        given = [positions(count, experts, dtype) for count in (1, 2, 9, 40)]
        expected = [experts(*each) for each in given]
        laid = LaidOutExperts(experts)
        for each, result in zip(given, expected, strict=True):
            torch.testing.assert_close(laid(*each), result, rtol=2**-7 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)


@torch.inference_mode()
def test_a_place_without_an_expert_adds_nothing(tmp_path: Path) -> None:
    experts = experts_of("mixtral", tmp_path / "model", "bfloat16")[0]
    hidden, chosen, weights = positions(12, experts, torch.bfloat16, none=True)
    number = len(experts.gate_up_proj)
    assert (chosen == number).any()
    laid = LaidOutExperts(experts)
    found = laid(hidden, chosen, weights)
    named, without = chosen.clamp(max=number - 1), weights.masked_fill(chosen == number, 0)
    torch.testing.assert_close(found, laid(hidden, named, without))
    nobody = torch.full_like(chosen, number)
    assert torch.equal(laid(hidden, nobody, weights), torch.zeros_like(hidden))


@pytest.mark.parametrize("family", MIXTURES)
def test_a_shard_has_them_in_the_place_of_the_stacks(family: str, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path / family)
    shard = load_shard(folder, LayerRange(0, num_layers(family)), dtype="bfloat16", device="cpu")
    laid = [module for _, module in shard.named_modules() if isinstance(module, LaidOutExperts)]
    assert laid
    assert not any(parameter.dim() == 3 for module in laid for parameter in module.parameters())
    held = [weakref.ref(parameter) for module in laid for parameter in module.parameters()]
    del laid
    shard.close()
    gc.collect()
    assert not any(each() is not None for each in held)


def test_small_ones_and_those_of_another_form_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny("gpt_oss", tmp_path / "other")  # with biases, gate and up interleaved
    model = plan_shard(folder, LayerRange(0, num_layers("gpt_oss")), dtype="bfloat16", device="cpu").load_model()
    lay_out_experts(model)
    assert not any(isinstance(module, LaidOutExperts) for module in model.modules())
    monkeypatch.setattr(packed_linear, "_LEAST_ELEMENTS", 1 << 30)
    folder = save_tiny("mixtral", tmp_path / "small")
    model = plan_shard(folder, LayerRange(0, num_layers("mixtral")), dtype="bfloat16", device="cpu").load_model()
    lay_out_experts(model)
    layers: list[nn.Module] = list(base_of(model).layers)
    assert layers
    assert not any(isinstance(module, LaidOutExperts) for layer in layers for module in layer.modules())
