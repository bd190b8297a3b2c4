"""Where the cache is, and what is said where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny_gguf
from meshnet_core.errors import InvalidInputError
from meshnet_core.layer_range import LayerRange
from meshnet_node.cache_folder import default_cache_dir
from meshnet_node.model_files import open_model


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESHNET_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "own"
    monkeypatch.setenv("MESHNET_CACHE", "")  # empty counts as unset
    assert default_cache_dir() == tmp_path / "xdg" / "meshnet"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "meshnet"


def test_a_home_that_does_not_exist_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_CACHE", "~no-such-user/cache")
    with pytest.raises(InvalidInputError, match="set MESHNET_CACHE to a folder"):
        default_cache_dir()


def test_a_cache_that_cannot_be_written_to_is_told_with_the_remedy(tmp_path: Path) -> None:
    model = tiny_gguf.lfm2().write(tmp_path / "tiny.gguf")
    no_folder = tmp_path / "file"
    no_folder.write_text("")
    with pytest.raises(InvalidInputError, match="set MESHNET_CACHE to a folder that can be written to"):
        open_model(str(model), cache_dir=no_folder / "cache")


def test_nor_is_one_that_became_so_before_the_conversion(tmp_path: Path) -> None:
    files = open_model(str(tiny_gguf.lfm2().write(tmp_path / "tiny.gguf")), cache_dir=tmp_path / "cache")
    (place,) = (tmp_path / "cache" / "gguf").iterdir()
    (place / "float32").write_text("")  # a file where a folder is to be; a root user could write to any folder
    with pytest.raises(InvalidInputError, match="set MESHNET_CACHE to a folder that can be written to"):
        files.prepare(LayerRange(0, files.num_layers), dtype="float32")
