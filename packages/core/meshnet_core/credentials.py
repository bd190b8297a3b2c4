"""What a machine shows and what it accepts on a connection: its certificate, and the authority of its mesh alone.

TLS 1.3, both sides with a certificate. Host names are not checked: the authority is the mesh's own and signs nothing
but machines of the mesh, whose addresses change (ADR-0013). Knows no HTTP.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshnet_core.errors import InvalidInputError


class WatchedSSLObject(ssl.SSLObject):
    """One connection's TLS, which tells when what arrives cannot be of its peer.

    asyncio closes such a connection without a word. ``broken`` is the error, ``on_broken`` is called with it.
    """

    broken: ssl.SSLError | None = None
    on_broken: Callable[[ssl.SSLError], None] | None = None

    def read(self, *arguments: Any) -> Any:
        try:
            return super().read(*arguments)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, ssl.SSLZeroReturnError, ssl.SSLSyscallError):
            raise
        except ssl.SSLError as error:
            self.broken = error
            if self.on_broken is not None:
                self.on_broken(error)
            raise


class Credentials:
    """One machine's identity in one mesh.

    Args:
        authority: the file with the certificate of the mesh's authority.
        certificate, key: the machine's files; the certificate's file may be replaced while they are in use, see
            :meth:`reload`.

    Raises:
        InvalidInputError: a file is missing, unreadable, or the key is not the certificate's.
    """

    def __init__(self, authority: Path, certificate: Path, key: Path) -> None:
        self._authority = authority
        self._certificate = certificate
        self._key = key
        self._contexts: list[ssl.SSLContext] = []
        self._client = self._context(ssl.PROTOCOL_TLS_CLIENT)

    def client_context(self) -> ssl.SSLContext:
        """For dialling parts of the mesh; the same one on every call, so that all connections share its sessions."""
        return self._client

    def server_context(self, *, optional_client: bool = False) -> ssl.SSLContext:
        """For listening; with ``optional_client`` callers may come without a certificate, but with none of another
        mesh's, and whoever answers them has to look (`secure_site.owner_of_request`)."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_OPTIONAL if optional_client else ssl.CERT_REQUIRED
        context.sslobject_class = WatchedSSLObject
        context.num_tickets = 0  # a resumed session would be of a certificate that may have ended meanwhile
        return context

    def reload(self) -> None:
        """Use the certificate that now is in the file for all connections made from here on."""
        for context in self._contexts:
            self._load(context)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = trusting(protocol, self._authority)
        self._load(context)
        self._contexts.append(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self._certificate, self._key)
        except (OSError, ssl.SSLError) as error:
            raise InvalidInputError(
                f"the certificate {self._certificate} and its key {self._key.name} cannot be used: {error}"
            ) from error


def trusting_nobody_yet() -> ssl.SSLContext:
    """For the one call that is made before anything can be trusted: what it brings is compared with a ticket's pin."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def trusting(protocol: int, authority: Path | bytes) -> ssl.SSLContext:
    """A context that accepts certificates of one authority alone, and shows none; ``authority`` is its certificate, a
    file or PEM.

    Raises:
        InvalidInputError: the file is missing or holds no certificate.
    """
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        if isinstance(authority, Path):
            context.load_verify_locations(authority)
        else:
            context.load_verify_locations(cadata=authority.decode())
    except (OSError, ssl.SSLError, ValueError) as error:
        raise InvalidInputError(f"the authority's certificate cannot be used: {error}") from error
    return context
