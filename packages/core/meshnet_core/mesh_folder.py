"""The folder that holds a machine's place in a mesh: its key, its certificate, the authority's, and where trackers are.

    ca.pem             certificate of the mesh's authority
    ca-key.pem         its key: only where machines are let in, that is where the mesh was created
    certificate.pem    this machine's
    key.pem            its key
    mesh.json          {"trackers": [url, ...]}, the newest first
    spent-tickets.json how often tickets were used, where machines are let in

Keys are readable by their owner alone. Knows no network.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from meshnet_core import certificates
from meshnet_core.credentials import Credentials
from meshnet_core.errors import InvalidInputError

KEPT_TRACKERS = 8


def default_path() -> Path:
    """``$MESHNET_HOME/mesh``, else ``meshnet/mesh`` in the user's configuration folder."""
    if home := os.environ.get("MESHNET_HOME"):
        return Path(home) / "mesh"
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "meshnet" / "mesh"


class MeshFolder:
    """The files of one mesh at ``path``, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.authority_path = path / "ca.pem"
        self.authority_key_path = path / "ca-key.pem"
        self.certificate_path = path / "certificate.pem"
        self.key_path = path / "key.pem"
        self.spent_path = path / "spent-tickets.json"
        self._mesh_path = path / "mesh.json"

    def is_there(self) -> bool:
        """Whether this machine is in a mesh."""
        return self.certificate_path.exists()

    def credentials(self) -> Credentials:
        """The machine's identity.

        Raises:
            InvalidInputError: files are missing or wrong.
        """
        return Credentials(self.authority_path, self.certificate_path, self.key_path)

    def authority(self) -> certificates.Authority | None:
        """What lets machines in; None where its key is not at hand.

        Raises:
            InvalidInputError: the files do not belong together.
        """
        if not self.authority_key_path.exists():
            return None
        return certificates.Authority(self.authority_path.read_bytes(), self.authority_key_path.read_bytes())

    def pin(self) -> str:
        """The SHA-256, in hex, of the authority's certificate."""
        return certificates.pin_of(self.authority_path.read_bytes())

    def create(self, mesh_name: str, machine_name: str) -> None:
        """Make a new mesh here, and let this machine in.

        Raises:
            InvalidInputError: there is one here, or a name is none.
        """
        if self.is_there() or self.authority_path.exists():
            raise InvalidInputError(f"there is a mesh in {self.path} already; name another folder with --mesh")
        now = certificates.utc_now()
        authority_key, key = certificates.new_key(), certificates.new_key()
        authority = certificates.Authority(certificates.make_authority(mesh_name, authority_key, now), authority_key)
        certificate = authority.sign(certificates.make_request(key, machine_name), now)
        self._write(self.authority_key_path, authority_key, secret=True)
        self.store(authority.certificate_pem, certificate, key, ())

    def keep_key(self, key: bytes) -> None:
        """Keep a private key, PEM, for which a certificate is still to be had."""
        if not self.key_path.exists():
            self._write(self.key_path, key, secret=True)

    def store(self, authority: bytes, certificate: bytes, key: bytes, trackers: Iterable[str]) -> None:
        """Keep a machine's identity, all PEM; the certificate is written last, so that half an identity is none."""
        self._write(self.key_path, key, secret=True)
        self._write(self.authority_path, authority)
        self.remember_trackers(trackers)
        self._write(self.certificate_path, certificate)

    def renew(self, certificate: bytes) -> None:
        """Replace the machine's certificate by a newer one of the same key."""
        self._write(self.certificate_path, certificate)

    def trackers(self) -> tuple[str, ...]:
        """Addresses of trackers of this mesh that are known here, the newest first."""
        try:
            document = json.loads(self._mesh_path.read_text("utf-8"))
        except FileNotFoundError:
            return ()
        except ValueError as error:
            raise InvalidInputError(f"{self._mesh_path} is no JSON: {error}; delete it and name --tracker") from error
        listed = document.get("trackers", []) if isinstance(document, dict) else []
        return tuple(url for url in listed if isinstance(url, str))

    def remember_trackers(self, urls: Iterable[str]) -> None:
        """Put ``urls`` before those that are known."""
        known = tuple(dict.fromkeys([*urls, *self.trackers()]))[:KEPT_TRACKERS]
        self._write(self._mesh_path, json.dumps({"trackers": known}, indent=1).encode())

    def _write(self, path: Path, data: bytes, *, secret: bool = False) -> None:
        """Replace a file as a whole; a secret was at no moment readable by others."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # of mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            if not secret:
                Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
