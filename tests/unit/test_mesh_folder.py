"""The folder of a machine's identity: who may read what, what is kept, what is refused."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from mesh_identities import machine_of, new_mesh
from meshnet_core import certificates
from meshnet_core.errors import InvalidInputError
from meshnet_core.mesh_folder import KEPT_TRACKERS, MeshFolder, default_path


def test_a_new_mesh_is_usable_and_its_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    folder = new_mesh(tmp_path / "deep" / "mesh")
    folder.credentials()
    for path in (folder.key_path, folder.authority_key_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.path.iterdir()) == [
        "ca-key.pem", "ca.pem", "certificate.pem", "key.pem", "mesh.json",
    ]  # fmt: skip


def test_a_mesh_is_not_made_over_another(tmp_path: Path) -> None:
    folder = new_mesh(tmp_path)
    before = folder.pin()
    with pytest.raises(InvalidInputError, match="there is a mesh"):
        folder.create("home", "first")
    assert folder.pin() == before


def test_a_machine_that_joined_lets_nobody_in(tmp_path: Path) -> None:
    mesh = new_mesh(tmp_path / "mesh")
    machine = machine_of(mesh, tmp_path / "machine")
    assert machine.authority() is None
    assert machine.pin() == mesh.pin()


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    folder = new_mesh(tmp_path)
    folder.key_path.write_bytes(certificates.new_key())
    with pytest.raises(InvalidInputError, match="cannot be used"):
        folder.credentials()


def test_the_newest_trackers_come_first_and_are_bounded(tmp_path: Path) -> None:
    folder = MeshFolder(tmp_path)
    assert folder.trackers() == ()
    for number in range(20):
        folder.remember_trackers([f"https://10.0.0.{number}:7400"])
    folder.remember_trackers(["https://10.0.0.18:7400"])
    known = folder.trackers()
    assert known[:3] == ("https://10.0.0.18:7400", "https://10.0.0.19:7400", "https://10.0.0.17:7400")
    assert len(known) == len(set(known)) == KEPT_TRACKERS


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESHNET_HOME", str(tmp_path))
    assert default_path() == tmp_path / "mesh"
    monkeypatch.delenv("MESHNET_HOME")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert default_path() == tmp_path / "xdg" / "meshnet" / "mesh"
