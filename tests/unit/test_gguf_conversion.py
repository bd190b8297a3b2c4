"""A GGUF becomes the same weights that transformers reads from it, a few layers at a time, once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import smollm2
import tiny_gguf
from meshnet_core.errors import UnsupportedModelError
from meshnet_core.layer_range import LayerRange
from meshnet_node.gguf_conversion import GgufConversion
from meshnet_node.model_files import open_model
from meshnet_node.shard_loader import load_shard
from meshnet_node.tensor_index import index_folder
from tiny_gguf import F32, SIZES, TinyGguf, convert, tiny_llama

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, Callable[[], TinyGguf]] = {
    "llama": lambda: tiny_gguf.processed("llama", "llama", **SIZES),
    "qwen2": lambda: tiny_gguf.processed("qwen2", "qwen2", **SIZES, tie_word_embeddings=True),
    "qwen3": lambda: tiny_gguf.processed("qwen3", "qwen3", **SIZES, head_dim=128),
    "qwen2moe": lambda: tiny_gguf.processed("qwen2moe", "qwen2_moe", **SIZES, **EXPERTS),
    "qwen3moe": lambda: tiny_gguf.processed("qwen3moe", "qwen3_moe", **SIZES, **EXPERTS, head_dim=32),
    "gemma2": lambda: tiny_gguf.processed("gemma2", "gemma2", **SIZES, head_dim=32),
    "gemma3": lambda: tiny_gguf.processed("gemma3", "gemma3_text", **SIZES, head_dim=32),
    "phi3": lambda: tiny_gguf.processed("phi3", "phi3", **SIZES),
    "lfm2": tiny_gguf.lfm2,
    "qwen35": tiny_gguf.qwen35,
    "qwen35moe": lambda: tiny_gguf.qwen35(moe=True),
}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def load_whole(folder: Path) -> Any:
    """The folder as transformers loads it, through an index of its files."""
    weights = {name: path.name for name, (path, _) in index_folder(folder).items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model, info = loaded
    assert not any(info.values()), info
    return model


# --- the real model


@pytest.fixture(scope="module")
def real_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    smollm2.gguf_path()
    return tmp_path_factory.mktemp("cache")


@pytest.mark.real_model
def test_real_tensors_equal_transformers_own_reading_bit_for_bit(real_cache: Path) -> None:
    model = open_model("smollm2", cache_dir=real_cache)
    for layer in (0, 14, 29):
        folder = model.prepare(LayerRange(layer, layer + 1), dtype="float32")
    own, reference = tensors_of(folder), smollm2.reference_model().state_dict()
    assert {name for name in own if ".layers." not in name} == {"model.embed_tokens.weight", "model.norm.weight"}
    assert {name.split(".")[2] for name in own if ".layers." in name} == {"0", "14", "29"}
    assert len(own) == 3 * 9 + 2
    for name, tensor in own.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, reference[name]), name


@pytest.mark.real_model
def test_the_second_half_brings_no_layer_of_the_first(real_cache: Path) -> None:
    model = open_model("smollm2", cache_dir=real_cache)
    calls: list[tuple[int, int]] = []
    folder = model.prepare(
        LayerRange(15, 30), dtype="bfloat16", progress=lambda _what, done, total: calls.append((done, total))
    )
    assert {path.stem for path in folder.glob("*.safetensors")} == {
        "embed",  # tied: the output projection is the embedding matrix
        "head",
        *(f"layer-{layer:05d}" for layer in range(15, 30)),
    }
    reference = smollm2.reference_model().state_dict()
    for name, tensor in tensors_of(folder).items():
        assert torch.equal(tensor, reference[name].bfloat16()), name
    assert calls[0][0] == 0
    assert calls[-1][0] == calls[-1][1]
    assert calls == sorted(calls)


@pytest.mark.real_model
def test_a_second_prepare_does_no_work(real_cache: Path) -> None:
    model = open_model("smollm2", cache_dir=real_cache)
    folder = model.prepare(LayerRange(0, 1), dtype="float32")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    calls: list[str] = []
    again = open_model("smollm2", cache_dir=real_cache)
    again.prepare(LayerRange(0, 1), dtype="float32", progress=lambda what, _done, _total: calls.append(what))
    assert calls == []
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.real_model
def test_the_real_config_and_tokenizer_are_transformers_own(real_cache: Path, tmp_path: Path) -> None:
    path = smollm2.gguf_path()
    model = open_model("smollm2", cache_dir=real_cache)
    assert (model.name, model.num_layers, model.hidden_size) == ("SmolLM2-135M-Instruct", 30, 576)
    assert model.max_positions == 8192
    theirs = AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    ours = AutoConfig.for_model(**model.config).to_dict()
    noted = {"architectures", "_name_or_path", "_model_name_or_path", "dtype"}
    assert {key: ours.get(key) for key in theirs if key not in noted} == {
        key: value for key, value in theirs.items() if key not in noted
    }
    files = model.text_files()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    tokenizer, reference = AutoTokenizer.from_pretrained(tmp_path), smollm2.reference_tokenizer()
    messages = [{"role": "user", "content": "What is 12 + 345?\n\tSay: naïve 你好 👩‍👩‍👧"}]
    text: Any = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>assistant\n")
    assert text == reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer(text)["input_ids"] == reference(text)["input_ids"]
    assert tokenizer.eos_token == "<|im_end|>"  # noqa: S105  a token of text
    assert json.loads(files["generation_config.json"])["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")


_MEASURE = """
import resource, sys
import torch, gguf, transformers
from pathlib import Path
from meshnet_core.layer_range import LayerRange
from meshnet_node.model_files import open_model
from meshnet_node.shard_loader import load_shard
import meshnet_node.gguf_tensor_map
torch.set_num_threads(1)
model = open_model("smollm2", cache_dir=Path(sys.argv[1]))
transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", hidden_size=8,
    intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
model.prepare(LayerRange(*map(int, sys.argv[2:4])), dtype="float32")
print((peak() - before) // 1024)
"""


@pytest.mark.long
@pytest.mark.real_model
@pytest.mark.parametrize(("layers", "limit_mb"), [((10, 13), 40), ((0, 1), 60)], ids=["middle", "with-embeddings"])
def test_converting_takes_little_memory(
    real_cache: Path, tmp_path: Path, layers: tuple[int, int], limit_mb: int
) -> None:
    """Three middle layers are 42 MB in fp32, the embeddings 113 MB; the peak follows neither."""
    open_model("smollm2", cache_dir=tmp_path)  # the vocabulary once, outside of what is measured
    child = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path), *map(str, layers)], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) < limit_mb


# --- other architectures


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_model_equals_transformers_own_reading_bit_for_bit(family: str, tmp_path: Path) -> None:
    path = FAMILIES[family]().write(tmp_path / "tiny.gguf")
    theirs = smollm2.load_gguf_with_transformers(path)
    own = load_whole(convert(path, tmp_path / "cache"))
    assert own.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, own.state_dict()[name]), name
    noted = {"architectures", "_name_or_path", "quantization_config"}
    kept = {key: value for key, value in theirs.config.to_dict().items() if key not in noted}
    assert {key: own.config.to_dict().get(key) for key in kept} == kept


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_comes_alone_and_loads_as_a_shard(family: str, tmp_path: Path) -> None:
    path = FAMILIES[family]().write(tmp_path / "tiny.gguf")
    model = open_model(str(path), cache_dir=tmp_path / "cache")
    folder = model.prepare(LayerRange(1, 2), dtype="float32")
    assert [file.name for file in folder.glob("*.safetensors")] == ["layer-00001.safetensors"]
    assert all(".layers.1." in name for name in index_folder(folder))
    whole = LayerRange(0, model.num_layers)
    for layers in (LayerRange(1, 2), whole.starting_at(model.num_layers - 1), LayerRange(0, 1)):
        shard = load_shard(model.prepare(layers, dtype="float32"), layers, dtype="float32", device="cpu")
        assert shard.layers == layers


def _permuted(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to q and k: pairs of rotated rows next to each other."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _from_hf_llama(model: Any) -> TinyGguf:
    tiny = tiny_llama(head_dim=16)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.layers.": "blk.",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    tiny.tensors = {}
    for name, tensor in model.state_dict().items():
        new = name
        for old, short in names.items():
            new = new.replace(old, short)
        values = tensor.numpy()
        if ".attn_q." in new or ".attn_k." in new:
            values = _permuted(values, 4 if ".attn_q." in new else 2)
        tiny.tensors[new] = (values, F32)
    return tiny


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("rope", ["default", "llama3"])
def test_llamas_rotary_layout_and_scaling_survive(rope: str, tmp_path: Path) -> None:
    """transformers drops the frequency factors of Llama 3.1 and later; the answers would be wrong."""
    torch.manual_seed(0)
    parameters = LLAMA3 if rope == "llama3" else {"rope_type": "default", "rope_theta": 10000.0}
    config = AutoConfig.for_model(
        "llama", vocab_size=tiny_gguf.VOCAB, **SIZES, rope_parameters=parameters, initializer_range=0.3
    )
    model = AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]
    tiny = _from_hf_llama(model)
    if rope == "llama3":
        base = 10000.0 ** (torch.arange(0, 16, 2) / 16)
        factors = (1 / base) / model.model.rotary_emb.inv_freq
        assert factors.max() > 7.9
        tiny.tensors["rope_freqs.weight"] = (factors.numpy(), F32)
    own = load_whole(convert(tiny.write(tmp_path / "tiny.gguf"), tmp_path / "cache"))
    ids = torch.randint(0, tiny_gguf.VOCAB, (1, 300))
    with torch.no_grad():
        assert torch.allclose(own(ids).logits, model(ids).logits, atol=1e-4)


def test_unknown_rotary_factors_are_refused(tmp_path: Path) -> None:
    tiny = tiny_llama(head_dim=16)
    tiny.tensors["rope_freqs.weight"] = (np.linspace(1, 3, 8, dtype=np.float32), F32)
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        convert(tiny.write(tmp_path / "tiny.gguf"), tmp_path / "cache")


def test_sizes_that_transformers_leaves_at_a_default_are_read(tmp_path: Path) -> None:
    tiny = tiny_gguf.processed(
        "qwen3moe", "qwen3_moe", **SIZES, **EXPERTS, head_dim=32, moe_intermediate_size=160, decoder_sparse_step=1
    )
    tiny.metadata["qwen3moe.expert_feed_forward_length"] = 160
    folder = convert(tiny.write(tmp_path / "tiny.gguf"), tmp_path / "cache")
    assert load_whole(folder).config.moe_intermediate_size == 160


def test_further_end_tokens_end_an_answer(tmp_path: Path) -> None:
    tiny = tiny_llama()
    tiny.metadata["tokenizer.ggml.eot_token_id"] = 1
    model = open_model(str(tiny.write(tmp_path / "tiny.gguf")), cache_dir=tmp_path / "cache")
    assert json.loads(model.text_files()["generation_config.json"])["eos_token_id"] == [2, 1]


# --- the cache


def test_broken_files_are_made_again(tmp_path: Path) -> None:
    path = tiny_llama().write(tmp_path / "tiny.gguf")
    folder = convert(path, tmp_path / "cache")
    good = {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
    (folder / "layer-00000.safetensors").write_bytes(good["layer-00000.safetensors"][:-10])
    (folder / "layer-00001.safetensors").write_bytes(b"")
    (folder / "layer-00002.safetensors").write_bytes(good["layer-00001.safetensors"])  # whole, but another layer's
    (folder / "head.safetensors").unlink()
    kept = (folder / "embed.safetensors").stat().st_mtime_ns
    convert(path, tmp_path / "cache")
    assert {file.name: file.read_bytes() for file in folder.glob("*.safetensors")} == good
    assert (folder / "embed.safetensors").stat().st_mtime_ns == kept


def test_an_interrupted_conversion_leaves_only_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_llama().write(tmp_path / "tiny.gguf")
    conversion = GgufConversion(path, tmp_path / "cache")
    calls = 0

    def interrupt(what: str, done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 8:  # inside the first layer
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversion.prepare(LayerRange(0, 3), dtype="float32", progress=interrupt)
    folder = conversion.folder / "float32"
    assert {file.name for file in folder.iterdir()} == {"config.json", "generation_config.json", "embed.safetensors"}
    # what a killed process leaves is under another name, and goes away when it is old
    (folder / ".layer-00000.safetensors.1.ab.partial").write_bytes(b"half")
    conversion.prepare(LayerRange(0, 2), dtype="float32")
    assert (folder / ".layer-00000.safetensors.1.ab.partial").is_file()
    os.utime(folder / ".layer-00000.safetensors.1.ab.partial", (0, 0))
    conversion.prepare(LayerRange(0, 3), dtype="float32")
    assert not list(folder.glob(".*"))


_PREPARE = """
import sys
from pathlib import Path
from meshnet_core.layer_range import LayerRange
from meshnet_node.model_files import open_model
from meshnet_node.shard_loader import load_shard
model = open_model(sys.argv[1], cache_dir=Path(sys.argv[2]))
print(model.fingerprint, model.prepare(LayerRange(0, 3), dtype="bfloat16"))
"""


@pytest.mark.long
def test_two_processes_may_convert_at_once(tmp_path: Path) -> None:
    path = tiny_llama().write(tmp_path / "tiny.gguf")
    command = [sys.executable, "-c", _PREPARE, str(path), str(tmp_path / "cache")]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in "ab"]
    outputs = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    shared = Path(outputs[0][0].split()[1])
    assert not list(shared.parent.rglob("*.partial"))
    alone = convert(path, tmp_path / "another", dtype="bfloat16")
    assert {file.name: file.read_bytes() for file in shared.iterdir()} == {
        file.name: file.read_bytes() for file in alone.iterdir()
    }


def test_another_file_under_the_same_name_is_converted_anew(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    before = tensors_of(convert(tiny_llama().write(path), tmp_path / "cache"))
    tiny_gguf.processed("llama", "llama", seed=1, **SIZES).write(path)
    after = tensors_of(convert(path, tmp_path / "cache"))
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])


def test_a_failed_tokenizer_leaves_no_text_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_llama().write(tmp_path / "tiny.gguf")

    def broken(*_args: Any, **_kwargs: Any) -> None:
        raise ValueError("no such tokenizer")

    with monkeypatch.context() as patch:
        patch.setattr(AutoTokenizer, "from_pretrained", broken)
        with pytest.raises(UnsupportedModelError, match=r"tiny\.gguf \(architecture llama\): no such tokenizer"):
            open_model(str(path), cache_dir=tmp_path / "cache")
    assert open_model(str(path), cache_dir=tmp_path / "cache").text_files().keys() >= {"config.json", "tokenizer.json"}
