"""``--quantize int8|int4``: rounding, packed experts, and shards whose weights are rounded as they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tests.tiny_gguf import processed
from tests.tiny_models import ALL, num_layers, save_tiny
from transformers import AutoConfig
from transformers.models.ernie4_5.modeling_ernie4_5 import Ernie4_5ForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from meshnet_core.errors import UnsupportedModelError
from meshnet_core.layer_range import LayerRange
from meshnet_node.model_files import open_model
from meshnet_node.packed_experts import PackedExperts, is_packable
from meshnet_node.packed_matrix import PackedMatrix, PackedStack
from meshnet_node.quantised_layers import QuantisedEmbedding, QuantisedLinear
from meshnet_node.shard_loader import load_shard, plan_shard
from meshnet_node.shard_route import ShardRoute
from meshnet_node.split import Split
from meshnet_node.unsplit_model import UnsplitModel
from meshnet_node.weight_rounding import rounded
from shard_routes import Route

CPU = torch.device("cpu")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("planes", "most"), [(2, 0.006), (1, 0.09)])
def test_rounding_loses_no_more_than_its_bits(planes: int, most: float) -> None:
    values = drawn(64, 256)
    values[3, :32] = 0
    values[4, 32:64] = 1.5
    found = torch.from_numpy(rounded(values, planes).values(planes))
    assert ((found - values).square().mean() / values.square().mean()).sqrt() < most
    assert torch.equal(found[3, :32], torch.zeros(32))
    assert (found[4, 32:64] - 1.5).abs().max() < 0.01


def test_a_few_values_far_out_cost_the_others_less() -> None:
    values = 0.1 * drawn(200, 32)
    values[:, 5] = 0.5
    codes = rounded(values, 1)
    least, greatest = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    step = (greatest - least) / 15
    plain = ((values - least) / step).round() * step + least
    assert (torch.from_numpy(codes.values(1)) - values).square().sum() < (plain - values).square().sum()


@pytest.mark.parametrize("planes", [1, 2])
def test_packed_experts_are_transformers_experts_of_the_same_weights(planes: int) -> None:
    config = AutoConfig.for_model(
        "qwen3_moe", num_experts=4, hidden_size=64, moe_intermediate_size=32, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    make: Any = Qwen3MoeExperts
    experts = make(config)
    stacks = []
    for name in ("gate_up_proj", "down_proj"):
        count, rows, columns = getattr(experts, name).shape
        stack, values = PackedStack(count, rows, columns, planes), 0.3 * drawn(count, rows, columns)
        for index in range(count):
            coded = rounded(values[index], planes)
            stack[index].fill(0, coded)
            values[index] = torch.from_numpy(coded.values(planes))
        getattr(experts, name).data = values
        stacks.append(stack)
    for positions in (1, 90):
        hidden = drawn(positions, 64).bfloat16()
        chosen = torch.stack([torch.arange(positions) % 4, (torch.arange(positions) + 1) % 3 + 1], dim=1)
        weights = torch.softmax(drawn(positions, 2), dim=-1)
        expected = experts(hidden.float(), chosen, weights)
        plain = make(config)
        found = PackedExperts(plain, *stacks)(hidden, chosen, weights.bfloat16())
        assert found.dtype == torch.bfloat16
        assert (found.float() - expected).abs().max() < 0.03 * expected.abs().max()
        assert not list(plain.parameters())


@pytest.mark.parametrize(
    ("family", "quantize"),
    [
        ("qwen2", "int8"),
        ("qwen3_5_moe_text", "int4"),
        *(
            pytest.param(family, quantize, marks=pytest.mark.long)
            for family, quantize in (
                ("llama", "int8"),
                ("llama", "int4"),
                ("qwen2", "int4"),
                ("qwen3_moe", "int8"),
                ("qwen3_moe", "int4"),
                ("qwen3_5_moe_text", "int8"),
            )
        ),
    ],
)
def test_a_rounded_split_gives_the_bits_of_the_rounded_whole(family: str, quantize: str, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path / family, **WIDE)
    layers = num_layers(family)
    model = ShardRoute(folder, Split.parse(f"0-{layers - 1}"), dtype="bfloat16", device="cpu", quantize=quantize)
    route = ShardRoute(folder, Split.parse(f"0-1,2-{layers - 1}"), dtype="bfloat16", device="cpu", quantize=quantize)
    assert route.dtype == f"bfloat16+{quantize}"
    ids, state, cut = list(range(3, 43)), model.open(), route.open()
    for start, stop in ((0, 30), (30, 37), *((at, at + 1) for at in range(37, 40))):
        expected = model.frame(ids[start:stop], start, state, 1)
        assert bool(expected.isfinite().all())
        assert torch.equal(route.frame(ids[start:stop], start, cut, 1), expected)


WIDE = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}


def test_eight_bits_are_nearly_what_bfloat16_gives_and_four_are_less(tmp_path: Path) -> None:
    folder, ids = save_tiny("llama", tmp_path / "llama", **WIDE), list(range(3, 43))
    exact = UnsplitModel(folder, torch.float32, CPU).frame(ids, 0, None, 40)
    away = {}
    for quantize in ("none", "int8", "int4"):
        model = UnsplitModel(folder, torch.bfloat16, CPU, quantize)
        away[quantize] = float((model.frame(ids, 0, None, 40) - exact).abs().mean())
    assert away["none"] < away["int8"] < 3 * away["none"]
    assert away["int8"] < away["int4"]


def test_what_is_planned_is_held_and_experts_are_packed_but_not_their_router(tmp_path: Path) -> None:
    folder = save_tiny("qwen3_5_moe_text", tmp_path / "moe", **WIDE)
    for layers in (LayerRange(0, 3), LayerRange(2, 5)):
        plan = plan_shard(folder, layers, dtype="bfloat16", device="cpu", quantize="int4")
        shard = plan.load()
        assert plan.dtype == shard.dtype == "bfloat16+int4"
        assert abs(shard.weight_bytes - plan.weight_bytes) < 2000  # recurrent parameters are kept in float32
        model: Any = shard._model
        held = dict(model.named_modules())
        assert sum(isinstance(module, PackedExperts) for module in held.values()) == len(layers)
        assert all(module.planes == 1 for module in held.values() if isinstance(module, PackedStack))
        kept = {name.rpartition(".")[2] for name, parameter in model.named_parameters() if parameter.dim() > 1}
        assert kept <= {"weight"}
        routers = [name for name, _ in model.named_parameters() if name.endswith("mlp.gate.weight")]
        assert len(routers) == len(layers)


def test_ends_of_a_model_stay_in_eight_bits(tmp_path: Path) -> None:
    folder = save_tiny("qwen2", tmp_path / "qwen2", **WIDE)  # tied
    model: Any = load_shard(folder, LayerRange(0, 4), dtype="bfloat16", device="cpu", quantize="int4")._model
    table, head = model.model.embed_tokens, model.lm_head
    assert isinstance(table, QuantisedEmbedding)
    assert isinstance(head, QuantisedLinear)
    assert table.matrix is head.matrix
    assert table.matrix.planes == 2


def test_where_packed_weights_cannot_be_had_is_refused_by_name(tmp_path: Path) -> None:
    llama = save_tiny("llama", tmp_path / "llama")
    with pytest.raises(UnsupportedModelError, match="--quantize int4 is for CPUs and bfloat16"):
        plan_shard(llama, LayerRange(0, 2), dtype="float32", device="cpu", quantize="int4")
    experts = save_tiny("gpt_oss", tmp_path / "gpt_oss")
    with pytest.raises(UnsupportedModelError, match=r"--quantize int8 does not do for gpt_oss: its experts"):
        plan_shard(experts, LayerRange(0, 2), dtype="bfloat16", device="cpu", quantize="int8")
    narrow = save_tiny("llama", tmp_path / "narrow", hidden_size=16, intermediate_size=24, head_dim=8)
    with pytest.raises(UnsupportedModelError, match="no plain products"):
        plan_shard(narrow, LayerRange(0, 2), dtype="bfloat16", device="cpu", quantize="int8")


def test_a_family_that_looks_at_weights_itself_is_refused_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mamba = save_tiny("mamba2", tmp_path / "mamba2")  # draws what was not loaded by weights of inner modules
    for layers in (LayerRange(0, 2), LayerRange(2, 4)):
        with pytest.raises(UnsupportedModelError, match=r"mamba2 uses weights otherwise.*--quantize none"):
            load_shard(mamba, layers, dtype="bfloat16", device="cpu", quantize="int8")
    ernie, forward = save_tiny("ernie4_5", tmp_path / "ernie4_5", **WIDE), Ernie4_5ForCausalLM.forward

    def reads(self: Any, *given: Any, **more: Any) -> Any:
        assert self.lm_head.weight.dtype == torch.bfloat16
        return forward(self, *given, **more)

    monkeypatch.setattr(Ernie4_5ForCausalLM, "forward", reads)
    load_shard(ernie, LayerRange(2, 4), dtype="bfloat16", device="cpu", quantize="none")
    with pytest.raises(UnsupportedModelError, match=r"ernie4_5 uses weights otherwise.*--quantize none"):
        load_shard(ernie, LayerRange(2, 4), dtype="bfloat16", device="cpu", quantize="int8")


@pytest.mark.long
@pytest.mark.parametrize("family", sorted(ALL))
def test_every_family_answers_from_eight_bits_or_is_refused(family: str, tmp_path: Path) -> None:
    wide = {} if family in {"bamba", "granitemoehybrid", "mamba2", "zamba2"} else WIDE
    folder, whole = save_tiny(family, tmp_path / family, **wide), LayerRange(0, num_layers(family))
    if family in {"gpt_oss", "granitemoehybrid", "llama4_text", "mamba2", "nemotron_h"}:
        with pytest.raises(UnsupportedModelError, match=family):
            load_shard(folder, whole, dtype="bfloat16", device="cpu", quantize="int8")
        return
    shard = load_shard(folder, whole, dtype="bfloat16", device="cpu", quantize="int8")
    route = Route([(shard, 0)])
    (state,) = states = route.open()
    for start, stop in ((0, 12), (12, 17), (17, 18), (18, 19)):
        logits = route.frame(list(range(start + 3, stop + 3)), start, states)
        assert bool(logits.isfinite().all())
        assert state.nbytes <= shard.state_bytes(0, stop)


def test_rounded_weights_are_another_model(tmp_path: Path) -> None:
    files = open_model(str(save_tiny("llama", tmp_path / "llama")))
    prints = {files.rounded(name).fingerprint for name in ("auto", "none", "int8", "int4")}
    assert len(prints) == 3
    assert files.rounded("auto").fingerprint == files.rounded("none").fingerprint == files.fingerprint


def test_four_bits_are_asked_of_a_gguf_of_eight(tmp_path: Path) -> None:
    made = processed("llama", "llama", num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4,
                     num_key_value_heads=2)  # fmt: skip
    files = open_model(str(made.write(tmp_path / "tiny.gguf")), cache_dir=tmp_path / "cache")
    folder = files.prepare(LayerRange(0, 2), dtype="bfloat16", packed=True)
    model: Any = load_shard(folder, LayerRange(0, 2), dtype="bfloat16", device="cpu", quantize="int4")._model
    planes = {name: module.planes for name, module in model.named_modules() if isinstance(module, PackedMatrix)}
    assert {name for name, count in planes.items() if count == 2} == {"model.embed_tokens.matrix", "lm_head.matrix"}
    assert sum(count == 1 for count in planes.values()) == 14


def test_experts_of_a_gguf_stay_packed(tmp_path: Path) -> None:
    made = processed("qwen3moe", "qwen3_moe", num_hidden_layers=2, hidden_size=64, intermediate_size=96,
                     num_attention_heads=4, num_key_value_heads=2, head_dim=32, moe_intermediate_size=32, num_experts=4,
                     num_experts_per_tok=2, max_position_embeddings=512)  # fmt: skip
    made.metadata["qwen3moe.expert_feed_forward_length"] = 32
    for name, (values, kind) in made.tensors.items():
        if kind is gguf.GGMLQuantizationType.Q8_0 and name.startswith("blk."):
            made.tensors[name] = (0.2 * values, gguf.GGMLQuantizationType.Q4_0)
    files = open_model(str(made.write(tmp_path / "tiny.gguf")), cache_dir=tmp_path / "cache")
    whole, ids = LayerRange(0, 2), [3, 77, 150, 9]
    packed = UnsplitModel(files.prepare(whole, dtype="bfloat16", packed=True), torch.bfloat16, CPU)
    plain = UnsplitModel(files.prepare(whole, dtype="float32"), torch.float32, CPU)
    assert sum(isinstance(module, PackedExperts) for module in packed._model.modules()) == 2
    found, expected = (model.frame(ids, 0, None, 4) for model in (packed, plain))
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.97


def test_only_experts_of_the_plain_form_are_packable() -> None:
    config = AutoConfig.for_model("qwen3_moe", num_experts=2, hidden_size=64, moe_intermediate_size=32)
    make: Any = Qwen3MoeExperts
    experts = make(config)
    assert is_packable(experts)
    for name, value in (("has_bias", True), ("is_transposed", True), ("is_concatenated", False), ("has_gate", False)):
        other = make(config)
        setattr(other, name, value)
        assert not is_packable(other), name
    assert not is_packable(torch.nn.Linear(4, 4))
