"""Equal contents have one fingerprint wherever they lie; changed contents have another."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import smollm2
from meshnet_node.fingerprint import SAMPLE_BYTES, SAMPLES, folder_fingerprint, gguf_fingerprint, hub_fingerprint
from meshnet_node.gguf_header import read_gguf_header

CONFIG = {"model_type": "llama", "hidden_size": 4, "transformers_version": "5.0"}


def _save(path: Path, *, seed: int = 0, count: int = 200_000, **more: torch.Tensor) -> Path:
    generator = torch.Generator().manual_seed(seed)
    save_file({"a.weight": torch.randn(count, generator=generator), **more}, path)
    return path


def _of(*files: Path, config: dict[str, Any] | None = None) -> str:
    return folder_fingerprint(CONFIG if config is None else config, files)


def test_moving_and_renaming_the_folder_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    before = _of(_save(tmp_path / "one" / "model.safetensors"))
    shutil.move(tmp_path / "one", tmp_path / "another")
    after = _of(tmp_path / "another" / "model.safetensors")
    assert before == after
    assert len(before) == 64


def test_what_the_saving_library_noted_changes_nothing(tmp_path: Path) -> None:
    path = _save(tmp_path / "m.safetensors")
    newer = {**reversed_copy(CONFIG), "transformers_version": "6.0", "_name_or_path": "/elsewhere"}
    assert _of(path) == _of(path, config=newer)


def reversed_copy(config: dict[str, Any]) -> dict[str, Any]:
    return dict(reversed(config.items()))


def test_config_names_shapes_and_dtypes_count(tmp_path: Path) -> None:
    base = _save(tmp_path / "base.safetensors")
    prints = {
        _of(base),
        _of(base, config={**CONFIG, "hidden_size": 8}),
        _of(_save(tmp_path / "more.safetensors", b=torch.zeros(1))),
        _of(_save(tmp_path / "long.safetensors", count=200_001)),
    }
    save_file({"other.weight": torch.zeros(200_000)}, tmp_path / "x.safetensors")
    save_file({"other.weight": torch.zeros(200_000, dtype=torch.int32)}, tmp_path / "y.safetensors")
    prints |= {_of(tmp_path / "x.safetensors"), _of(tmp_path / "y.safetensors")}
    assert len(prints) == 6


def test_a_changed_byte_in_a_sampled_block_shows(tmp_path: Path) -> None:
    path = _save(tmp_path / "m.safetensors")
    before, data = _of(path), path.read_bytes()
    size, start = len(data), len(data) - 800_000
    last = size - SAMPLE_BYTES
    for step in range(SAMPLES):
        at = start + (last - start) * step // (SAMPLES - 1) + 17
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert _of(path) != before, step
    path.write_bytes(data)
    assert _of(path) == before


def test_other_weights_show(tmp_path: Path) -> None:
    assert _of(_save(tmp_path / "a.safetensors")) != _of(_save(tmp_path / "b.safetensors", seed=1))


def test_a_file_smaller_than_a_block_counts_whole(tmp_path: Path) -> None:
    path = _save(tmp_path / "m.safetensors", count=10)
    before, data = _of(path), bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert _of(path) != before


def test_of_a_file_of_many_gigabytes_samples_are_read(tmp_path: Path) -> None:
    """Reading all of it would outlast the time that a test has."""
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.truncate(60_000_000_000)
    before = gguf_fingerprint(path, 1 << 20)
    with path.open("r+b") as file:
        file.truncate(60_000_000_001)
    assert gguf_fingerprint(path, 1 << 20) != before


def test_hub_hashes_and_config_count() -> None:
    files = {"a": "1", "b": "2"}
    assert hub_fingerprint(CONFIG, files) == hub_fingerprint(CONFIG, dict(reversed(files.items())))
    others = {hub_fingerprint(CONFIG, {"a": "1", "b": "3"}), hub_fingerprint({"model_type": "x"}, files)}
    assert hub_fingerprint(CONFIG, files) not in others


@pytest.mark.real_model
def test_the_real_gguf_is_the_same_under_another_name(tmp_path: Path) -> None:
    path = smollm2.gguf_path()
    before = gguf_fingerprint(path, read_gguf_header(path).data_start)
    shutil.copy(path, tmp_path / "renamed.gguf")
    assert gguf_fingerprint(tmp_path / "renamed.gguf", read_gguf_header(path).data_start) == before
