"""Experts' products of few rows in C code, against the products that they stand for; and the layout that they read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshnet_node import laid_out_experts, packed_linear
from meshnet_node.column_layout import in_columns, lies_in_columns
from meshnet_node.laid_out_experts import LaidOutExperts
from meshnet_node.model_backend import TorchModelShard
from meshnet_node.native_experts import MOST_ROWS, NativeExperts
from meshnet_node.packed_linear import can_pack, laid_out
from meshnet_node.step_kernels import step_kernels
from native_compiler import needs_compiler
from step_logits import FRAMES, WIDE, assert_near, run, whole_shard


def reads_columns() -> bool:
    """Whether this CPU's products read the layout that the kernel has."""
    if not can_pack():
        return False
    matrix = torch.randn(128, 64).bfloat16()
    return lies_in_columns(laid_out(matrix), matrix)


pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    needs_compiler,
    pytest.mark.skipif(not reads_columns(), reason="this CPU's products read weights in another layout"),
]
MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"]
Load = Callable[..., TorchModelShard]


@pytest.fixture(autouse=True)
def _every_size_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "_LEAST_ELEMENTS", 1)


@pytest.fixture
def shards(tmp_path: Path) -> Load:
    return partial(whole_shard, tmp_path)


def experts_of(shard: TorchModelShard) -> list[LaidOutExperts]:
    return [module for module in shard.whole_view().plain_layers.modules() if isinstance(module, LaidOutExperts)]


def native_of(module: LaidOutExperts) -> NativeExperts:
    kernels = step_kernels()
    assert kernels is not None
    assert NativeExperts.can_run(module)
    native = NativeExperts(module, kernels)
    native.enter()
    return native


def positions(count: int, experts: LaidOutExperts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, chosen experts and weights; now and then the number that stands for no expert."""
    draw = torch.Generator().manual_seed(count)
    chosen = torch.stack([torch.randperm(experts.count + 1, generator=draw)[:3] for _ in range(count)])
    weights = torch.rand(count, 3, generator=draw).bfloat16()
    return torch.randn(count, experts.hidden, generator=draw).bfloat16(), chosen, weights


def calls_seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call that the modules' own products take from now on."""
    own, rows = LaidOutExperts.forward, []

    def noting(module: LaidOutExperts, hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return own(module, hidden, *others)

    monkeypatch.setattr(LaidOutExperts, "forward", noting)
    return rows


@pytest.mark.parametrize("family", MIXTURES)
@torch.inference_mode()
def test_they_give_what_the_products_give(family: str, shards: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    for experts in experts_of(shards(family, **WIDE)):
        given = [positions(count, experts) for count in (1, 2, 5, MOST_ROWS)]
        given += [(hidden, chosen, weights.float()) for hidden, chosen, weights in given]
        expected = [experts(*each) for each in given]
        with monkeypatch.context() as within:
            own = calls_seen(within)
            native_of(experts)
            results = [experts(*each) for each in given]
        assert not own
        for found, wanted in zip(results, expected, strict=True):
            assert (found == wanted).double().mean() >= 0.9  # else one sum in another order rounds to the neighbour
            torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-6 * float(wanted.abs().max()))


@pytest.mark.parametrize("family", MIXTURES)
def test_the_logits_are_those_of_the_layers(family: str, shards: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**WIDE, "initializer_range": 0.05}  # else other experts are chosen by rounding too often
    exact = run(shards(family, "float32", **settings).whole_view())
    shard = shards(family, **settings)
    plain = run(shard.whole_view())
    own = calls_seen(monkeypatch)
    shard.use_kernels()
    assert shard.runs_native
    own.clear()
    assert_near(run(shard.whole_view()), plain, exact)
    assert set(own) == {FRAMES[0]}
    assert torch.equal(run(shard.whole_view(), plain=True), plain)
    assert set(own) == set(FRAMES)


@torch.inference_mode()
def test_what_is_not_for_it_is_the_modules_own(shards: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = experts_of(shards("qwen3_moe", **WIDE))[0]
    own = calls_seen(monkeypatch)
    native = native_of(experts)
    hidden, chosen, weights = positions(2, experts)
    experts(hidden, chosen, weights)
    assert not own
    experts(*positions(MOST_ROWS + 1, experts))
    assert own == [MOST_ROWS + 1]
    native.is_on = False
    experts(hidden, chosen, weights)
    native.is_on = True
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    experts(hidden, chosen, weights)
    assert own == [MOST_ROWS + 1, 2, 2]
    native.leave()
    assert "forward" not in vars(experts)


@pytest.mark.parametrize("change", ["act", "gate", "layout", "hidden"])
def test_another_form_of_the_module_is_left_alone(change: str, shards: Load) -> None:
    experts = experts_of(shards("qwen3_moe", **WIDE))[0]
    plain: Any = experts.plain
    assert NativeExperts.can_run(experts)
    if change == "act":
        plain.act_fn = nn.GELU()
    elif change == "gate":
        plain.__class__ = type("Other", (type(plain),), {"_apply_gate": lambda _module, both: both})
    elif change == "layout":
        experts.in_columns = False
    else:
        experts.hidden = 96
    assert not NativeExperts.can_run(experts)
    assert not NativeExperts.can_run(plain)


def test_in_float32_they_are_left_alone(shards: Load) -> None:
    experts = experts_of(shards("qwen3_moe", "float32", **WIDE))
    assert not any(NativeExperts.can_run(module) for module in experts)
    for module in experts:
        module.in_columns = True
        assert not NativeExperts.can_run(module)


def test_the_layout_is_looked_at_and_not_assumed(shards: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(128, 64).bfloat16()
    laid = laid_out(matrix)
    assert lies_in_columns(laid, matrix)
    assert not lies_in_columns(laid, matrix.flip(0))
    assert not lies_in_columns(laid, matrix.float())
    assert not lies_in_columns(in_columns(matrix), matrix)
    assert not lies_in_columns(laid, torch.randn(100, 64).bfloat16())
    monkeypatch.setattr(laid_out_experts, "laid_out", lambda expert: laid_out(expert.flip(0)))
    assert not any(module.in_columns for module in experts_of(shards("qwen3_moe", **WIDE)))
