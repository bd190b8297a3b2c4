"""A shard reads and holds its own layers' tensors and no others; what cannot be served is refused, with its reason."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from meshnet_core.errors import InvalidInputError, ModelNotFoundError, UnsupportedModelError
from meshnet_core.layer_range import LayerRange
from meshnet_node import family_support
from meshnet_node.checkpoint_reader import CheckpointReader, StoredTensor
from meshnet_node.device_choice import choose_device, choose_dtype
from meshnet_node.model_backend import TorchModelShard
from meshnet_node.shard_loader import load_shard
from meshnet_node.shard_work import ShardWork
from shard_routes import assert_close
from tiny_models import ALL, CORE, VOCAB, num_layers, save_tiny


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def tiny(root: Path, family: str, name: str = "", **options: Any) -> Path:
    folder = root / (name or family)
    return folder if folder.exists() else save_tiny(family, folder, **options)


def load(folder: Path, start: int, stop: int, **options: Any) -> TorchModelShard:
    return load_shard(folder, LayerRange(start, stop), **{"dtype": "float32", "device": "cpu", **options})


def stored_names(folder: Path, *fragments: str) -> set[str]:
    return {name for name in CheckpointReader(folder).tensors if any(part in name for part in fragments)}


@pytest.fixture
def read_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors read from disk, in order; every read of a checkpoint's data goes through ``read``."""
    names: list[str] = []
    read = StoredTensor.read

    def recorded(self: StoredTensor) -> torch.Tensor:
        names.append(self.name)
        return read(self)

    monkeypatch.setattr(StoredTensor, "read", recorded)
    return names


def test_a_middle_shard_reads_and_holds_its_layers_alone(root: Path, read_names: list[str]) -> None:
    folder = tiny(root, "llama")
    shard = load(folder, 1, 3)
    wanted = stored_names(folder, "layers.1.", "layers.2.")
    assert sorted(read_names) == sorted(wanted)  # each of them once
    held = sum(CheckpointReader(folder).tensors[name].nbytes for name in wanted)
    rotary = 2 * (8 // 2) * 4  # two buffers of half a head's frequencies
    assert shard.weight_bytes == held + rotary
    assert not shard.is_first
    assert not shard.is_last


def test_the_first_shard_brings_the_embedding_and_the_last_one_norm_and_projection(
    root: Path, read_names: list[str]
) -> None:
    folder = tiny(root, "llama")
    load(folder, 0, 1)
    assert set(read_names) == stored_names(folder, "layers.0.", "embed_tokens")
    read_names.clear()
    load(folder, 3, 4)
    assert set(read_names) == stored_names(folder, "layers.3.", "model.norm", "lm_head")


def test_a_tied_tail_holds_the_embedding_as_its_projection(root: Path, read_names: list[str]) -> None:
    folder = tiny(root, "qwen2")
    shard = load(folder, 3, 4)
    wanted = stored_names(folder, "layers.3.", "model.norm", "embed_tokens")
    assert set(read_names) == wanted
    assert shard.weight_bytes < sum(CheckpointReader(folder).tensors[name].nbytes for name in wanted) + 100
    whole = load(folder, 0, 4)
    assert whole.weight_bytes < sum(entry.nbytes for entry in CheckpointReader(folder).tensors.values()) + 100


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "qwen3_5_moe_text"])
def test_fused_experts_are_made_from_one_tensor_per_expert(family: str, root: Path, read_names: list[str]) -> None:
    folder = tiny(root, family)
    assert stored_names(folder, "layers.2.mlp.experts.0.gate_proj")
    load(folder, 2, 3)
    assert sorted(read_names) == sorted(stored_names(folder, "layers.2."))


def test_progress_adds_up_to_the_bytes_of_the_range(root: Path) -> None:
    folder = tiny(root, "qwen3_moe")
    seen: list[tuple[int, int]] = []
    load(folder, 1, 3, progress=lambda done, total: seen.append((done, total)))
    tensors = CheckpointReader(folder).tensors
    total = sum(tensors[name].nbytes for name in stored_names(folder, "layers.1.", "layers.2."))
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {expected for _, expected in seen} == {total}


def test_a_sharded_checkpoint_loads_like_a_single_file(root: Path) -> None:
    single, sharded = tiny(root, "llama"), tiny(root, "llama", "llama-sharded", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    for name, parameter in load(single, 1, 3)._model.named_parameters():
        assert torch.equal(parameter, load(sharded, 1, 3)._model.get_parameter(name))


def test_a_folder_with_only_the_needed_tensors_is_enough(root: Path, tmp_path: Path) -> None:
    folder = tiny(root, "qwen3_moe")
    weights = load_file(folder / "model.safetensors")
    for layer in (1, 2):
        mine = {name: tensor for name, tensor in weights.items() if f"layers.{layer}." in name}
        save_file(mine, tmp_path / f"layer-{layer:05d}.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    assert load(tmp_path, 1, 3).weight_bytes == load(folder, 1, 3).weight_bytes
    with pytest.raises(ModelNotFoundError, match=r"lacks \d+ tensors that layers 1-3 need.*lm_head"):
        load(tmp_path, 1, 4)


def test_a_missing_expert_is_told_and_not_made_up(root: Path, tmp_path: Path) -> None:
    folder = tiny(root, "qwen3_moe")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.experts.3.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises((ModelNotFoundError, InvalidInputError), match="experts"):
        load(tmp_path, 2, 3)


def test_tensors_of_another_shape_are_refused(root: Path, tmp_path: Path) -> None:
    folder = tiny(root, "llama")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    _edit_config(tmp_path, intermediate_size=64)
    with pytest.raises(InvalidInputError, match=r"config\.json says"):
        load(tmp_path, 1, 2)


def test_a_truncated_file_is_refused(root: Path, tmp_path: Path) -> None:
    folder = tiny(root, "llama")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(InvalidInputError, match=r"model\.safetensors"):
        load(tmp_path, 0, 4)


def test_a_range_past_the_end_names_the_layers_there_are(root: Path) -> None:
    with pytest.raises(InvalidInputError, match="its layers are 0-3"):
        load(tiny(root, "llama"), 2, 5)


def test_no_model_no_weights(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        load(tmp_path, 0, 1)
    shutil.copy(tiny(root, "llama") / "config.json", tmp_path)
    with pytest.raises(ModelNotFoundError, match="safetensors"):
        load(tmp_path, 0, 1)


@pytest.mark.parametrize("model_type", sorted(family_support.REASONS))
def test_families_known_to_fail_are_refused_with_their_reason(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(UnsupportedModelError) as refusal:
        load(tmp_path, 0, 1)
    assert model_type in refusal.value.message
    assert family_support.REASONS[model_type] in refusal.value.message


def test_families_that_no_test_covers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox"}))
    with pytest.raises(
        UnsupportedModelError, match=r"gpt_neox is not supported: .*never tested; supported are .*llama"
    ):
        load(tmp_path, 0, 1)


def test_unknown_families_and_code_from_a_checkpoint_are_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_family"}))
    with pytest.raises(UnsupportedModelError, match="no_such_family"):
        load(tmp_path, 0, 1)
    shutil.copytree(tiny(root, "llama"), tmp_path, dirs_exist_ok=True)
    bomb = "raise SystemExit('code of a checkpoint was run')\n"
    (tmp_path / "configuration_bomb.py").write_text(bomb)
    _edit_config(tmp_path, auto_map={"AutoConfig": "configuration_bomb.BombConfig"})
    load(tmp_path, 1, 2)


_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("family", "edit", "reason"),
    [
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic rope"),
        ("phi3", {"rope_parameters": _LONG_ROPE}, "longrope"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "both directions"),
    ],
)
def test_options_that_cannot_be_cut_are_refused(
    family: str, edit: dict[str, Any], reason: str, root: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny(root, family), tmp_path, dirs_exist_ok=True)
    _edit_config(tmp_path, **edit)
    with pytest.raises(UnsupportedModelError, match=reason):
        load(tmp_path, 0, 1)


def test_every_family_of_the_registry_has_a_tiny_model() -> None:
    assert set(ALL) == set(family_support.FAMILIES)
    assert set(CORE) <= set(ALL)


@pytest.mark.parametrize("wrapper", sorted(family_support.TEXT_TOWERS))
def test_a_multimodal_checkpoint_is_served_as_its_text_tower(wrapper: str, root: Path, tmp_path: Path) -> None:
    tower = family_support.TEXT_TOWERS[wrapper]
    text = AutoConfig.from_pretrained(tiny(root, tower))
    vision = {"depth": 1, "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 32}
    vision |= {"num_heads": 2, "num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14}
    tied = text.tie_word_embeddings
    config = AutoConfig.for_model(wrapper, text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=tied)
    torch.manual_seed(0)
    whole: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    whole.save_pretrained(tmp_path)
    ids = list(range(3, 20))
    if wrapper == "llama4":  # the wrapper's own forward wants an image
        whole = whole.language_model
    if wrapper == "gemma4":
        whole.config.text_config.pad_token_id = 0
    with torch.inference_mode():
        expected = whole(input_ids=torch.tensor([ids])).logits[0]
    cut, layers = 2, num_layers(tower)
    first, last = load(tmp_path, 0, cut), load(tmp_path, cut, layers)
    payload: bytes | memoryview = torch.tensor(ids, dtype=torch.int32).numpy().tobytes()
    for shard in (first, last):
        (result,) = shard.forward([ShardWork(shard.layers.start, None, 0, 17, payload, "float32", sample=17)])
        assert not isinstance(result, Exception)
        payload = result.hidden or b""
    assert result.logits is not None
    assert_close(result.logits, expected)


def test_weights_equal_what_from_pretrained_makes(root: Path) -> None:
    folder = tiny(root, "qwen3_5_moe_text")
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    shard = load(folder, 1, 4, dtype="bfloat16")
    names = [name for name, _ in shard._model.named_parameters()]
    assert any("experts.gate_up_proj" in name for name in names)
    for name in names:
        mine, theirs = shard._model.get_parameter(name), whole.get_parameter(name)
        assert mine.dtype is theirs.dtype
        assert torch.equal(mine, theirs)
    for name, buffer in shard._model.named_buffers():
        assert torch.equal(buffer, whole.get_buffer(name))


def test_auto_dtype_follows_device_and_checkpoint() -> None:
    cpu, cuda, mps = torch.device("cpu"), torch.device("cuda"), torch.device("mps")
    wide, half, brain = torch.float32, torch.float16, torch.bfloat16

    def choose(device: torch.device, stored: torch.dtype, *, native: bool, requested: str = "auto") -> torch.dtype:
        return choose_dtype(requested, device, stored, cpu_bfloat16=lambda: native, cuda_bfloat16=lambda: native)

    assert choose(cpu, brain, native=True) is brain
    assert choose(cpu, half, native=True) is brain
    assert choose(cpu, brain, native=False) is wide
    assert choose(cpu, wide, native=True) is wide
    assert choose(cuda, brain, native=True) is brain
    assert choose(cuda, half, native=True) is half
    assert choose(cuda, brain, native=False) is half
    assert choose(mps, brain, native=True) is half
    assert choose(cpu, brain, native=True, requested="float32") is wide
    with pytest.raises(InvalidInputError, match="int8"):
        choose(cpu, brain, native=True, requested="int8")


def test_devices_that_are_not_there_are_refused() -> None:
    assert choose_device("cpu").type == "cpu"
    with pytest.raises(InvalidInputError, match="unknown"):
        choose_device("toaster")
    if not torch.cuda.is_available():
        with pytest.raises(InvalidInputError, match="it has cpu"):
            choose_device("cuda")


_PROBE = """
import json, resource, sys
from pathlib import Path
from meshnet_core.layer_range import LayerRange
from meshnet_node import shard_loader
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
def read():
    return next(int(line.split()[1]) for line in open("/proc/self/io") if line.startswith("rchar"))
shard_loader.load_shard(Path(sys.argv[2]), LayerRange(0, 1), dtype="float32", device="cpu")  # imports, warm-up
before, read_before = status("VmRSS"), read()
shard = shard_loader.load_shard(Path(sys.argv[1]), LayerRange(int(sys.argv[3]), int(sys.argv[4])), dtype=sys.argv[5],
                                device="cpu")
print(json.dumps({"peak": status("VmHWM") - before, "held": status("VmRSS") - before,
                  "read": read() - read_before, "weights": shard.weight_bytes}))
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="measures with /proc")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_peak_memory_and_bytes_read_follow_the_range(family: str, root: Path, tmp_path: Path) -> None:
    """In fresh processes, by the kernel's own counts, on a model of some 400 MB in bfloat16."""
    layers = 12
    size: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 64, "vocab_size": 8000}
    if family == "llama":
        size |= {"intermediate_size": 8192}
    else:
        size |= {"moe_intermediate_size": 512, "num_experts": 20, "mlp_only_layers": []}
    config = AutoConfig.for_model(
        family, num_hidden_layers=layers, num_key_value_heads=2, tie_word_embeddings=True, **size
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    del model
    total = sum(entry.nbytes for entry in CheckpointReader(tmp_path).tensors.values())
    assert total > 300e6
    embedding = 8000 * 512 * 2
    layer = (total - embedding) // layers

    def measure(start: int, stop: int, dtype: str = "bfloat16") -> dict[str, int]:
        arguments = [str(tmp_path), str(tiny(root, "llama")), str(start), str(stop), dtype]
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, *arguments], check=True, capture_output=True, text=True, timeout=200
        )
        result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
        return result

    slack = 24e6  # allocator, activations of the warm-up forward, config and header text
    for start, stop in ((4, 6), (0, 3), (9, 12)):
        ends = embedding if start == 0 or stop == layers else 0
        figures = measure(start, stop)
        expected = (stop - start) * layer + ends
        print(
            f"{family} layers {start}-{stop - 1}: whole {total / 1e6:.0f} MB, expected {expected / 1e6:.0f}, {figures}"
        )
        assert abs(figures["weights"] - expected) < 0.01 * expected
        assert figures["read"] < 1.01 * expected + 2e6
        # One layer is converted at a time: fused experts take their parts, the stacks and the result for a moment, and
        # what that leaves behind in the allocator is less than a layer.
        fused = layer if family == "qwen3_moe" else 0
        assert figures["held"] < expected + fused + slack
        # Gate and up projections are joined into one matrix that then is laid out, a second time of it for a moment.
        joined = 2 * size["intermediate_size"] * size["hidden_size"] * 2 if family == "llama" else 0
        assert figures["peak"] < expected + 2 * fused + max(slack, joined + 16e6)


def _edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


assert VOCAB < 256
