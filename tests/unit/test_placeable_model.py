"""What a model tells of its layers before anything is loaded is what loading them then takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshnet_core.dtypes import dtype_bytes
from meshnet_core.errors import UnsupportedModelError
from meshnet_core.layer_range import LayerRange
from meshnet_node import placeable_model
from meshnet_node.family_support import FAMILIES
from meshnet_node.model_files import open_model
from meshnet_node.packed_linear import can_pack
from meshnet_node.placeable_model import PlaceableModel
from meshnet_node.shard_loader import plan_shard
from tiny_models import CORE, MORE, save_tiny

QUICK = ("llama", "qwen2", "gemma3_text", "qwen3_next", "mamba2", "gemma4_text", "zamba2")
ALL = [family if family in QUICK else pytest.param(family, marks=pytest.mark.long) for family in (*CORE, *MORE)]


@pytest.mark.parametrize("family", ALL)
def test_the_facts_say_what_every_shard_of_the_family_takes(family: str, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path / "m")
    model = PlaceableModel(open_model(str(folder)), dtype="float32", device="cpu")
    facts = model.facts()
    total, width = facts.num_layers, dtype_bytes(model.dtype)
    edges = sorted({*facts.boundaries[:2], *facts.boundaries[-2:]})
    for start in edges:
        for stop in (edge for edge in edges if edge > start):
            layers = LayerRange(start, stop)
            planned = plan_shard(folder, layers, dtype="float32", device="cpu")
            assert facts.weight_elements(layers) * width == planned.weight_bytes
    assert model.plan(folder, LayerRange(0, total)).load().weight_bytes > 0


def test_a_plan_made_later_loads_the_same_shard(tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path / "m")
    model = PlaceableModel(open_model(str(folder)), dtype="float32", device="cpu")
    for layers in (LayerRange(0, 2), LayerRange(2, 4), LayerRange(1, 4)):
        ours, theirs = model.plan(folder, layers).load(), plan_shard(folder, layers, dtype="float32").load()
        assert (ours.layers, ours.weight_bytes, ours.dtype) == (theirs.layers, theirs.weight_bytes, theirs.dtype)


def test_dtype_auto_goes_by_what_the_config_says(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "m")
    assert PlaceableModel(open_model(str(folder)), device="cpu").dtype == "float32"


@pytest.mark.parametrize(
    ("family", "dtype", "packs", "native"),
    [
        ("llama", "bfloat16", False, True),  # its steps, at least
        ("llama", "float32", False, False),
        ("llama", "float32", True, True),  # its chunks
        ("qwen3_next", "bfloat16", False, True),
        ("lfm2", "bfloat16", False, False),
        ("lfm2", "bfloat16", True, True),
    ],
)
def test_whether_steps_or_chunks_may_be_native_is_known_before_anything_is_loaded(
    family: str, dtype: str, packs: bool, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placeable_model, "can_pack", lambda _: packs)
    files = open_model(str(save_tiny(family, tmp_path / "m")))
    assert PlaceableModel(files, dtype=dtype, device="cpu").may_run_native is native


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["llama", "qwen3_next", "lfm2"])
def test_a_shard_that_asks_for_kernels_was_expected_to(family: str, dtype: str, tmp_path: Path) -> None:
    if not can_pack(getattr(torch, dtype)):
        pytest.skip("this CPU packs no weights of that dtype")
    model = PlaceableModel(open_model(str(save_tiny(family, tmp_path / "m"))), dtype=dtype, device="cpu")
    shard = model.plan(tmp_path / "m", LayerRange(0, 3)).load()
    asked: list[None] = []
    shard.use_kernels(lambda: asked.append(None))
    assert model.may_run_native
    if FAMILIES[family].quick or dtype == "bfloat16":  # of others in float32 products alone, and these are too small
        assert asked


def test_a_family_with_few_cuts_tells_them(tmp_path: Path) -> None:
    folder = save_tiny("zamba2", tmp_path / "m")
    model = PlaceableModel(open_model(str(folder)), device="cpu")
    assert model.facts().cuts == ()
    with pytest.raises(UnsupportedModelError, match="cannot be cut"):
        model.plan(folder, LayerRange(0, 1))


def test_room_is_kept_for_no_more_positions_than_the_model_takes(tmp_path: Path) -> None:
    model = PlaceableModel(open_model(str(save_tiny("llama", tmp_path / "m"))), device="cpu")
    assert model.facts().room == 512 * 2 * 2 * 8  # positions, keys and values, heads, their size
    assert model.facts(100).room == 100 * 2 * 2 * 8
