"""As which machine of which mesh a command speaks, and whether it may listen for others without being one."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from meshnet_core.errors import InvalidInputError

if TYPE_CHECKING:
    import ssl

    from meshnet_core.credentials import Credentials
    from meshnet_core.mesh_folder import MeshFolder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """This machine in a mesh: its files, and what connections need of them."""

    folder: MeshFolder
    credentials: Credentials

    def remember(self, trackers: Sequence[str]) -> None:
        """Know ``trackers`` the next time; a folder that cannot be written to is no reason not to go on."""
        if tuple(trackers) == self.folder.trackers()[: len(trackers)]:
            return
        try:
            self.folder.remember_trackers(trackers)
        except OSError as error:
            logger.warning("where the trackers are was not written down: %s", error)


def identity_for(host: str, mesh: Path | None, *, insecure: bool, command: str) -> Identity | None:
    """The identity that a command which listens on ``host`` speaks as; None where it does without certificates.

    Args:
        host: as given with ``--host``.
        mesh: as given with ``--mesh``.
        insecure: as given with ``--insecure``.
        command: its name, for messages.

    Raises:
        InvalidInputError: it would be open to other machines without certificates, or the folder is unusable.
    """
    if insecure:
        if mesh is not None:
            raise InvalidInputError("--mesh is an identity to speak as, --insecure is to have none; give one of them")
        if not is_loopback(host):
            logger.warning(
                "%s on %s without certificates and without encryption: whoever reaches it may use it, read what passes "
                "and change it", command, host,
            )  # fmt: skip
        return None
    identity = identity_in(mesh)
    if identity is None and not is_loopback(host):
        raise InvalidInputError(
            f"meshnet {command} on {host} would be open to everyone there, since this machine is in no mesh. Make one "
            "with `meshnet mesh create`, or join one with `meshnet join TICKET`; --insecure goes without"
        )
    return identity


def identity_in(mesh: Path | None) -> Identity | None:
    """The identity in a folder, the default one if None; None where there is none in the default one.

    Raises:
        InvalidInputError: the folder named holds none, or what it holds is unusable.
    """
    from meshnet_core.mesh_folder import MeshFolder, default_path

    folder = MeshFolder(mesh or default_path())
    if folder.is_there():
        return Identity(folder, _usable(folder))
    if mesh is not None:
        raise InvalidInputError(
            f"--mesh {mesh} holds no identity; make a mesh there with `meshnet mesh create --mesh {mesh}`, "
            f"or join one with `meshnet join TICKET --mesh {mesh}`"
        )
    return None


def _usable(folder: MeshFolder) -> Credentials:
    """The folder's credentials, unless their time is over; where the authority's key is, they are renewed."""
    from meshnet_core import certificates

    now, certificate = certificates.utc_now(), folder.certificate_path.read_bytes()
    if certificates.expires_at(certificate) <= now:
        authority, ended = folder.authority(), certificates.expires_at(certificate)
        if authority is None:
            raise InvalidInputError(
                f"this machine's certificate in {folder.path} ended on {ended:%Y-%m-%d}: "
                "join again with a new ticket (`meshnet mesh ticket` where the mesh was made)"
            )
        name = certificates.common_name(certificate)
        folder.renew(authority.sign(certificates.make_request(folder.key_path.read_bytes(), name), now))
    return folder.credentials()


def client_tls(identity: Identity | None) -> ssl.SSLContext | None:
    """What to dial parts of the mesh with; None for plain HTTP."""
    return None if identity is None else identity.credentials.client_context()


def scheme_of(identity: Identity | None) -> str:
    return "http" if identity is None else "https"


def is_loopback_url(url: str) -> bool:
    """As :func:`is_loopback`, of the host in an address."""
    return is_loopback(urlsplit(url).hostname or "")


def is_loopback(host: str) -> bool:
    """Whether what listens on ``host`` is reached from this machine alone; a name that is none is for `serving.listen`
    to complain of."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        return True
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)
