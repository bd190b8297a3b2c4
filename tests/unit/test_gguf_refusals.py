"""GGUF files that cannot be read rightly, are garbage or broken: refused by name, before any work."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny_gguf
from meshnet_core.errors import InvalidInputError, UnsupportedModelError
from meshnet_node.gguf_header import read_gguf_header
from meshnet_node.model_files import open_model
from tiny_gguf import F32, Q8, TinyGguf, convert, tiny_llama

# --- refusals


def _with_metadata(**more: Any) -> TinyGguf:
    tiny = tiny_llama()
    tiny.metadata |= {key.replace("__", "."): value for key, value in more.items()}
    return tiny


@pytest.mark.parametrize(
    ("tiny", "reason"),
    [
        (lambda: TinyGguf("qwen3next", {}), r"architecture qwen3next, which transformers cannot read.*safetensors"),
        (lambda: TinyGguf("deepseek2", {}), r"architecture deepseek2"),
        (lambda: _with_metadata(llama__expert_count=8), r"mixture of experts of architecture llama"),
        (lambda: _with_metadata(general__type="adapter"), r"of type adapter"),
        (lambda: _with_metadata(split__count=3), r"one of 3 split files.*--merge"),
        (
            lambda: _with_metadata(llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0),
            r"scales its rotary positions \(linear\)",
        ),
    ],
    ids=["qwen3next", "deepseek2", "mixtral", "adapter", "split", "rope-scaling"],
)
def test_what_cannot_be_read_rightly_is_refused_by_name(tiny: Any, reason: str, tmp_path: Path) -> None:
    path = tiny().write(tmp_path / "tiny.gguf")
    with pytest.raises(UnsupportedModelError, match=reason):
        open_model(str(path), cache_dir=tmp_path / "cache")


def test_tensors_must_match_the_model_one_to_one(tmp_path: Path) -> None:
    extra, missing, shape = tiny_llama(), tiny_llama(), tiny_llama()
    extra.tensors["blk.0.attn_sinks.weight"] = (np.ones(4, np.float32), F32)
    del missing.tensors["blk.1.ffn_up.weight"]
    shape.tensors["blk.1.ffn_up.weight"] = (np.ones((64, 64), np.float32), Q8)
    for name, tiny, reason in (
        ("extra", extra, "drops blk.0.attn_sinks.weight"),
        ("missing", missing, "lacks 1 tensors .* model.layers.1.mlp.up_proj.weight"),
        ("shape", shape, r"has the shape \[64, 64\] in this GGUF of llama and \[96, 64\]"),
    ):
        with pytest.raises(UnsupportedModelError, match=reason):
            convert(tiny.write(tmp_path / f"{name}.gguf"), tmp_path / "cache")


def test_a_block_type_without_a_dequantiser_is_refused(tmp_path: Path) -> None:
    tiny = tiny_llama()
    path = tiny.write(tmp_path / "tiny.gguf")
    data = bytearray(path.read_bytes())
    name = b"blk.1.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    assert struct.unpack_from("<I", data, at)[0] == Q8.value
    struct.pack_into("<I", data, at, gguf.GGMLQuantizationType.I8.value)
    path.write_bytes(data)
    with pytest.raises(UnsupportedModelError, match=r"type I8.*another way"):
        open_model(str(path), cache_dir=tmp_path / "cache")


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    tiny = tiny_llama()
    tiny.tensors["output_norm.weight"] = (np.full(64, 1e6, np.float32), F32)
    path = tiny.write(tmp_path / "tiny.gguf")
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight has values beyond float16"):
        convert(path, tmp_path / "cache", dtype="float16")
    assert not list((tmp_path / "cache").rglob("head.safetensors"))
    convert(path, tmp_path / "cache", dtype="bfloat16")


def test_a_disk_without_room_is_refused_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_llama().write(tmp_path / "tiny.gguf")
    monkeypatch.setattr("shutil.disk_usage", lambda _folder: type("", (), {"free": 1000}))
    with pytest.raises(InvalidInputError, match="MESHNET_CACHE"):
        convert(path, tmp_path / "cache")


# --- garbage


@given(st.binary(max_size=300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(InvalidInputError, match="not a usable GGUF file"):
        read_gguf_header(path)
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + data)
    with pytest.raises(InvalidInputError, match="not a usable GGUF file"):
        read_gguf_header(path)


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
def test_a_changed_head_never_crashes_the_reader(tmp_path: Path, data: st.DataObject) -> None:
    whole = tmp_path / "whole.gguf"
    if not whole.is_file():
        tiny_llama(num_hidden_layers=1).write(whole)
    content = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 12_000))] = data.draw(st.integers(0, 255))
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    try:
        read_gguf_header(path)
    except InvalidInputError as error:
        assert "not a usable GGUF file" in error.message  # noqa: PT017  either is right here


def test_a_broken_download_is_refused(tmp_path: Path) -> None:
    path = tiny_llama().write(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InvalidInputError, match="broken download"):
        open_model(str(path), cache_dir=tmp_path / "cache")


def test_a_header_equals_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = tiny_gguf.qwen35(moe=True).write(tmp_path / "tiny.gguf")
    header, reader = read_gguf_header(path), gguf.GGUFReader(path)
    assert set(header.tensors) == {tensor.name for tensor in reader.tensors}
    for theirs in reader.tensors:
        own = header.tensors[theirs.name]
        assert (own.start, own.nbytes, own.ggml_type) == (theirs.data_offset, theirs.n_bytes, theirs.tensor_type)
        assert list(reversed(own.shape)) == theirs.shape.tolist()
    assert header.metadata["tokenizer.ggml.tokens"] == tiny_gguf.VOCAB
    assert header.metadata["qwen35moe.rope.dimension_sections"] == [2, 1, 1, 0]
    assert math.isclose(header.metadata["qwen35moe.attention.layer_norm_rms_epsilon"], 1e-6, rel_tol=1e-6)
