"""Shards of GGUF files whose blocks stay packed: the same bits as the whole packed model, and what the file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tests.tiny_gguf import TinyGguf, processed, qwen35

from meshnet_core.errors import InvalidInputError
from meshnet_core.layer_range import LayerRange
from meshnet_node.gguf_blocks import BLOCK_BYTES
from meshnet_node.model_files import ModelFiles, open_model
from meshnet_node.packed_matrix import PackedMatrix
from meshnet_node.quantised_layers import QuantisedEmbedding, QuantisedLinear
from meshnet_node.shard_loader import load_shard, plan_shard
from meshnet_node.shard_route import ShardRoute
from meshnet_node.split import Split
from meshnet_node.unsplit_model import UnsplitModel
from meshnet_node.verification import verify

KINDS = {kind: gguf.GGMLQuantizationType[kind] for kind in BLOCK_BYTES}
LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def with_blocks(tiny: TinyGguf, kind: str) -> TinyGguf:
    """The same with every matrix of a layer in blocks of a kind; the embedding keeps Q8_0."""
    for name, (values, held) in tiny.tensors.items():
        if name.startswith("blk.") and held is gguf.GGMLQuantizationType.Q8_0:
            tiny.tensors[name] = (0.1 * values, KINDS[kind])
    return tiny


def tiny(arch: str, kind: str, **settings: Any) -> TinyGguf:
    if arch == "qwen35":
        return with_blocks(qwen35(), kind)
    return with_blocks(processed(arch, arch, **LLAMA, **settings), kind)


def opened(made: TinyGguf, folder: Path) -> ModelFiles:
    return open_model(str(made.write(folder / "tiny.gguf")), cache_dir=folder / "cache")


def whole(files: ModelFiles) -> LayerRange:
    return LayerRange(0, files.num_layers)


def frames(model: UnsplitModel, length: int = 24) -> torch.Tensor:
    """Logits of a chunk and of steps after it."""
    ids = [(7 * index + 3) % 250 for index in range(length)]
    state = model.open()
    rows = [model.frame(ids[:10], 0, state, 10)]
    rows += [model.frame(ids[at : at + 1], at, state, 1) for at in range(10, length)]
    return torch.cat(rows)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen35"])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_moved_to_where_transformers_has_their_values(arch: str, kind: str, tmp_path: Path) -> None:
    files = opened(tiny(arch, kind), tmp_path)
    values = {}
    for path in files.prepare(whole(files), dtype="float32").glob("*.safetensors"):
        values |= load_file(path)
    kept = {}
    for path in files.prepare(whole(files), dtype="bfloat16", packed=True).glob("*.safetensors"):
        kept |= load_file(path)
    blocks = {name.rpartition(".")[0]: name for name in kept if name.rpartition(".")[2] in KINDS}
    assert len(blocks) > 4 * files.num_layers
    assert len(kept) == len(values)
    for name, stored in blocks.items():
        held = gguf.dequantize(kept[stored].numpy(), KINDS[stored.rpartition(".")[2]])
        assert torch.equal(torch.from_numpy(held), values[name]), name


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen35"])
def test_packed_answers_are_those_of_the_values_but_for_rounding(arch: str, tmp_path: Path) -> None:
    files = opened(tiny(arch, "Q4_1"), tmp_path)
    cpu = torch.device("cpu")
    exact = frames(UnsplitModel(files.prepare(whole(files), dtype="float32"), torch.float32, cpu))
    packed_folder = files.prepare(whole(files), dtype="bfloat16", packed=True)
    packed = frames(UnsplitModel(packed_folder, torch.bfloat16, cpu))
    plain = frames(UnsplitModel(files.prepare(whole(files), dtype="bfloat16"), torch.bfloat16, cpu))
    # No further from float32 than bfloat16 is by itself, give or take.
    assert (packed - exact).abs().mean() <= 3 * (plain - exact).abs().mean()
    assert torch.nn.functional.cosine_similarity(packed, exact).min() > 0.99


@pytest.mark.parametrize(
    ("arch", "kind"),
    [
        ("llama", "Q4_1"),
        pytest.param("qwen2", "Q4_0", marks=pytest.mark.long),
        pytest.param("qwen35", "Q8_0", marks=pytest.mark.long),
    ],
)
def test_packed_splits_answer_as_the_packed_whole_does(arch: str, kind: str, tmp_path: Path) -> None:
    files = opened(tiny(arch, kind), tmp_path)
    folder = files.prepare(whole(files), dtype="bfloat16", packed=True)
    splits = [Split.parse("0-1,2-3"), Split.parse("0-2,1-3")]
    prompts = [[5, 9, 200, 31, 77, 8, 3, 100, 42], list(range(40, 140))]
    found = verify(folder, splits, prompts, tokens=8, dtype="bfloat16", device="cpu")
    assert not found.differing
    assert found.dtype == ("bfloat16+int8" if kind == "Q8_0" else "bfloat16+int4")


def test_the_same_frames_give_the_same_bits_cut_or_whole(tmp_path: Path) -> None:
    files = opened(tiny("llama", "Q4_1"), tmp_path)
    folder = files.prepare(whole(files), dtype="bfloat16", packed=True)
    model = ShardRoute(folder, Split.parse("0-3"), dtype="bfloat16", device="cpu")
    route = ShardRoute(folder, Split.parse("0-1,2-3"), dtype="bfloat16", device="cpu")
    ids, state, cut = list(range(3, 43)), model.open(), route.open()
    for start, stop in ((0, 30), (30, 37), *((at, at + 1) for at in range(37, 40))):
        expected = model.frame(ids[start:stop], start, state, 1)
        assert torch.equal(route.frame(ids[start:stop], start, cut, 1), expected)


def test_what_is_planned_is_what_is_held_and_tied_weights_are_held_once(tmp_path: Path) -> None:
    files = opened(tiny("llama", "Q4_1", tie_word_embeddings=True), tmp_path)
    assert files.blocks == "int4"
    folder = files.prepare(whole(files), dtype="bfloat16", packed=True)
    for layers in (whole(files), LayerRange(0, 2), LayerRange(1, 3), LayerRange(2, 4)):
        plan = plan_shard(folder, layers, dtype="bfloat16", device="cpu")
        shard = plan.load()
        assert plan.dtype == shard.dtype == "bfloat16+int4"
        assert 0 <= shard.weight_bytes - plan.weight_bytes < 1000  # buffers of rotary frequencies
        model: Any = shard._model
        tables = [module for module in model.modules() if isinstance(module, QuantisedEmbedding)]
        assert len(tables) == (layers.start == 0)
        assert isinstance(model.lm_head, QuantisedLinear) == (layers.stop == 4)
        if layers == whole(files):
            assert model.lm_head.matrix is tables[0].matrix
        packed = {id(module) for module in model.modules() if isinstance(module, PackedMatrix)}
        assert len(packed) == 7 * len(layers) + (layers.start == 0 or layers.stop == 4)


def test_progress_counts_every_byte_read_once(tmp_path: Path) -> None:
    files = opened(tiny("llama", "Q4_0"), tmp_path)
    folder = files.prepare(LayerRange(0, 2), dtype="bfloat16", packed=True)
    told: list[tuple[int, int]] = []
    load_shard(folder, LayerRange(0, 2), dtype="bfloat16", device="cpu", progress=lambda *at: told.append(at))
    assert told[-1][0] == told[-1][1]
    assert sorted(told) == told


def test_packed_blocks_are_not_for_float32(tmp_path: Path) -> None:
    files = opened(tiny("llama", "Q4_0"), tmp_path)
    folder = files.prepare(LayerRange(0, 2), dtype="bfloat16", packed=True)
    for settings in ({"dtype": "float32"}, {"dtype": "bfloat16", "quantize": "none"}):
        with pytest.raises(InvalidInputError, match="packed weights"):
            load_shard(folder, LayerRange(0, 2), device="cpu", **settings)
    with pytest.raises(InvalidInputError, match="--quantize"):
        load_shard(folder, LayerRange(0, 2), device="cpu", quantize="int3")
