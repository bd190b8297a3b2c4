"""A mesh, a machine of it and a stranger; what is turned away is in the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from mesh_identities import machine_of, new_mesh
from meshnet_core.credentials import Credentials
from meshnet_core.mesh_folder import MeshFolder


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> MeshFolder:
    return new_mesh(tmp_path_factory.mktemp("mesh"))


@pytest.fixture(scope="module")
def machine(mesh: MeshFolder, tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return machine_of(mesh, tmp_path_factory.mktemp("machine")).credentials()


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    """Of another mesh with the same name."""
    return new_mesh(tmp_path_factory.mktemp("stranger")).credentials()


@pytest.fixture(autouse=True)
def _log_all(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, "meshnet_core"):
        yield
