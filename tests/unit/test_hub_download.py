"""Weights from a hub, a local stand-in: interrupted and gone on with, refused, damaged, a disk that is full."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import fake_hub
from meshnet_core.errors import InvalidInputError, ModelNotFoundError
from meshnet_core.layer_range import LayerRange
from meshnet_node import hub_download
from meshnet_node.hub_download import PARTIAL
from meshnet_node.model_files import open_model
from meshnet_node.shard_loader import load_shard
from tiny_models import save_tiny

ALL = LayerRange(0, 4)
FILE = "model.safetensors"


class Place(NamedTuple):
    """A hub that serves one tiny model, and where things are kept here."""

    hub: fake_hub.FakeHub
    folder: Path
    cache: Path

    def prepare(self, layers: LayerRange = ALL, told: list[tuple[int, int]] | None = None) -> Path:
        def progress(what: str, done: int, total: int) -> None:
            assert what.startswith("fetching model")
            if told is not None:
                told.append((done, total))

        model = open_model(fake_hub.HUB_ID, cache_dir=self.cache / "meshnet")
        return model.prepare(layers, dtype="float32", progress=progress)

    @property
    def size(self) -> int:
        return (self.folder / FILE).stat().st_size

    @property
    def blobs(self) -> Path:
        return self.cache / "hub" / "models--org--tiny" / "blobs"

    def partials(self) -> list[int]:
        return [path.stat().st_size for path in self.blobs.glob(f"*{PARTIAL}")]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    folder = save_tiny("llama", tmp_path / "m")
    with fake_hub.serve(folder) as hub:
        # The hub client reads HF_ENDPOINT and HF_HOME when it is imported.
        where = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", where)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 500)  # what a broken connection may lose
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)  # its pauses for breath
        yield Place(hub, folder, tmp_path / "cache")


def test_what_is_fetched_lies_where_the_hub_client_has_it_and_loads(place: Place) -> None:
    folder = place.prepare()
    weights = (folder / FILE).read_bytes()
    assert weights == (place.folder / FILE).read_bytes()
    assert (folder / FILE).is_symlink()
    assert (folder / FILE).resolve() == place.blobs / hashlib.sha256(weights).hexdigest()
    assert not place.partials()
    assert load_shard(folder, ALL, dtype="float32", device="cpu").layers == ALL
    from huggingface_hub import hf_hub_download  # noqa: PLC0415  as another tool would, after the cache was set

    assert hf_hub_download(fake_hub.HUB_ID, FILE, revision=fake_hub.COMMIT, local_files_only=True)


def test_progress_is_told_in_bytes_and_ends_at_all_of_them(place: Place) -> None:
    told: list[tuple[int, int]] = []
    place.prepare(told=told)
    assert told[0] == (0, place.size)
    assert told[-1] == (place.size, place.size)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_nothing_is_asked_for_again_that_is_here(place: Place) -> None:
    place.prepare()
    before = list(place.hub.fetched)
    told: list[tuple[int, int]] = []
    place.prepare(told=told)
    assert (place.hub.fetched, told) == (before, [])


def test_a_connection_that_breaks_is_gone_on_with_where_it_broke(place: Place) -> None:
    place.hub.cuts[:] = [1000, 2000]
    place.prepare()
    starts = [start for name, start in place.hub.starts if name == FILE]
    assert starts == [0, 1000, 3000]


def test_a_download_that_was_given_up_goes_on_at_the_next_start(place: Place) -> None:
    place.hub.cuts[:] = [10_000, *[0] * 20]
    with pytest.raises(ModelNotFoundError, match=r"broke off at 0\.0 MiB of 0\.1 MiB: .*goes on from there"):
        place.prepare()
    assert place.partials() == [10_000]
    place.hub.cuts.clear()
    place.hub.starts.clear()
    told: list[tuple[int, int]] = []
    folder = place.prepare(told=told)
    assert place.hub.starts == [(FILE, 10_000)]
    assert told[0] == (10_000, place.size)
    assert (folder / FILE).read_bytes() == (place.folder / FILE).read_bytes()
    assert not place.partials()


def test_a_process_that_is_stopped_in_mid_file_leaves_what_it_had(place: Place) -> None:
    class Stopped(BaseException):
        pass

    def stop(what: str, done: int, total: int) -> None:
        if done:
            raise Stopped

    model = open_model(fake_hub.HUB_ID, cache_dir=place.cache / "meshnet")
    place.hub.cuts[:] = [5000]
    with pytest.raises(Stopped):
        model.prepare(ALL, dtype="float32", progress=stop)
    kept = sum(place.partials())
    place.hub.starts.clear()
    place.prepare()
    assert place.hub.starts[0] == (FILE, kept)


def test_what_arrives_damaged_is_thrown_away_and_not_gone_on_with(place: Place) -> None:
    place.hub.damaged = True
    with pytest.raises(ModelNotFoundError, match=r"model\.safetensors of org/tiny arrived damaged"):
        place.prepare()
    assert not place.partials()
    place.hub.damaged = False
    assert (place.prepare() / FILE).is_file()


def test_a_left_over_that_is_too_long_begins_anew(place: Place) -> None:
    digest = hashlib.sha256((place.folder / FILE).read_bytes()).hexdigest()
    place.blobs.mkdir(parents=True)
    (place.blobs / f"{digest}{PARTIAL}").write_bytes(bytes(place.size + 1))
    assert (place.prepare() / FILE).is_file()


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (403, "GatedRepo", r"gives no access to model\.safetensors of org/tiny; log in with `hf auth login`"),
        (401, "RepoNotFound", r"gives no access to model\.safetensors of org/tiny"),
        (404, "EntryNotFound", r"the hub refused model\.safetensors of org/tiny"),
        (500, "", r"the hub refused model\.safetensors of org/tiny: .*500"),
    ],
)
def test_what_the_hub_refuses_is_told(status: int, code: str, told: str, place: Place) -> None:
    place.hub.refuses = (status, code)
    with pytest.raises(ModelNotFoundError, match=told):
        place.prepare()


def test_a_disk_that_is_too_small_is_told_before_anything_is_fetched(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_download, "_ROOM_LEFT", 2**60)
    with pytest.raises(InvalidInputError, match=r"needs 0\.1 MiB, and .* are free; make room, or set HF_HOME"):
        place.prepare()
    assert FILE not in place.hub.fetched


def test_a_disk_that_fills_up_meanwhile_is_told(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hub_download, "http_get", full)
    with pytest.raises(InvalidInputError, match=r"cannot download to .*: No space left on device; make room"):
        place.prepare()


def test_of_a_sharded_checkpoint_only_own_files_are_fetched_by_two_ranges_that_share_some(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(place.folder)
    save_tiny("llama", place.folder, max_shard_size="20KB")
    weights = json.loads((place.folder / "model.safetensors.index.json").read_text())["weight_map"]
    own = {n: {file for name, file in weights.items() if f".layers.{n}." in name} for n in range(4)}
    place.prepare(LayerRange(1, 2))
    assert {name for name in place.hub.fetched if name.endswith(".safetensors")} == own[1]
    place.hub.fetched.clear()
    folder = place.prepare(LayerRange(1, 3))
    assert {name for name in place.hub.fetched if name.endswith(".safetensors")} == own[2] - own[1]
    assert load_shard(folder, LayerRange(1, 3), dtype="float32", device="cpu").layers == LayerRange(1, 3)


def test_a_listing_that_an_older_version_kept_has_no_sizes_and_does(place: Place) -> None:
    place.prepare()
    (kept,) = (place.cache / "meshnet" / "hub").glob("*.json")
    document = json.loads(kept.read_text())
    assert document.pop("sizes") == {FILE: place.size}
    kept.write_text(json.dumps(document))
    place.hub.refuses = (500, "")
    assert (place.prepare() / FILE).is_file()
