"""Decode steps compiled by a real compiler, in the process that nodes start for it. Takes most of a minute a kind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from in_process_mesh import random_prompt
from meshnet_core.errors import HopFailedError
from meshnet_core.layer_range import LayerRange
from meshnet_node import packed_linear, step_child, step_compiler
from meshnet_node.layer_sketch import LayerSketch
from meshnet_node.layer_sketches import sketch_layers
from meshnet_node.model_backend import TorchModelShard
from meshnet_node.packed_linear import PackedLinear, can_pack
from meshnet_node.quantised_layers import QuantisedLinear
from meshnet_node.shard_loader import load_shard
from meshnet_node.step_compiler import compile_in_child, folder
from meshnet_node.step_frames import StoppedError
from meshnet_node.step_warm_up import StepState, StepWarmUp
from shard_routes import Models, Route
from tiny_models import num_layers, save_tiny

NEEDS_COMPILER = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_CACHE", str(tmp_path / "cache"))


def shard_of(models: Models, family: str, dtype: str = "float32") -> TorchModelShard:
    return load_shard(models.folder(family), LayerRange(0, num_layers(family)), dtype=dtype, device="cpu")


def logits_of(shard: TorchModelShard) -> torch.Tensor:
    ids = random_prompt(30)
    route = Route([(shard, 0)])
    states = route.open()
    return torch.cat([route.prefill(ids[:13], states), route.decode(ids[13:], 13, states)])


@pytest.mark.long
@NEEDS_COMPILER
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "lfm2", "qwen3_next"])
def test_compiled_steps_answer_as_plain_ones(models: Models, family: str) -> None:
    shard = shard_of(models, family)
    plain = logits_of(shard)
    first = StepWarmUp(shard, is_worth=lambda found: True, sleep=lambda seconds: None)
    first.run()
    assert first.status.state is StepState.READY, first.status.detail
    torch.testing.assert_close(logits_of(shard), plain, rtol=0, atol=1e-4)
    assert len(list(folder().glob("*.pt2"))) == len(list(folder().glob("*.json")))


@pytest.mark.long
@NEEDS_COMPILER
def test_packed_weights_are_called_from_compiled_layers_and_kept_libraries_are_loaded(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "_LEAST_ELEMENTS", 1)
    shard = shard_of(models, "llama", "bfloat16")
    packed = sum(isinstance(module, PackedLinear) for _, module in shard.named_modules())
    assert packed or not can_pack()
    plain = logits_of(shard)
    first = StepWarmUp(shard, is_worth=lambda found: True, sleep=lambda seconds: None)
    first.run()
    assert first.status.state is StepState.READY, first.status.detail
    torch.testing.assert_close(logits_of(shard), plain, rtol=0.1, atol=0.1)

    monkeypatch.setattr(step_compiler, "_run_child", lambda *_: pytest.fail("there is nothing left to compile"))
    again = shard_of(models, "llama", "bfloat16")
    second = StepWarmUp(again, is_worth=lambda found: True, sleep=lambda seconds: None)
    second.run()
    assert second.status.state is StepState.READY, second.status.detail


@pytest.mark.long
@NEEDS_COMPILER
def test_weights_of_four_bits_are_called_from_compiled_layers(tmp_path: Path) -> None:
    wide = save_tiny("llama", tmp_path / "llama", hidden_size=64, head_dim=16, intermediate_size=96)
    shard = load_shard(wide, LayerRange(0, num_layers("llama")), dtype="bfloat16", device="cpu", quantize="int4")
    assert any(isinstance(module, QuantisedLinear) for _, module in shard.named_modules())
    plain = logits_of(shard)
    first = StepWarmUp(shard, is_worth=lambda found: True, sleep=lambda seconds: None)
    first.run()
    assert first.status.state is StepState.READY, first.status.detail
    torch.testing.assert_close(logits_of(shard), plain, rtol=0.1, atol=0.1)


def sketches_of(shard: TorchModelShard) -> list[LayerSketch]:
    return sketch_layers(shard, lambda: False)[:1]


def test_a_child_that_nobody_wants_any_more_is_ended(models: Models) -> None:
    with pytest.raises(StoppedError):
        compile_in_child(sketches_of(shard_of(models, "llama")), lambda: True)
    assert not list(folder().glob("*"))


def test_a_file_where_the_node_was_started_is_not_taken_for_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    step_compiler._run_child([], lambda: False)


def test_a_child_whose_node_is_gone_leaves_nothing_of_its_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    for name in ("meshnet-compile-1", "of-somebody-else"):
        work = tmp_path / name
        work.mkdir()
        (work / "sketches").touch()
        lifeline, node = os.pipe()
        os.close(node)
        step_child._end_with_parent(work, lifeline)
        os.close(lifeline)
    assert codes == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["of-somebody-else"]


def test_a_child_that_fails_is_told_with_its_error(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_compiler.sys, "executable", shutil.which("false"))
    with pytest.raises(HopFailedError, match="compiling failed: it ended with code 1"):
        compile_in_child(sketches_of(shard_of(models, "llama")), lambda: False)
