"""Lets machines into the mesh over a tracker's HTTP API: the authority's certificate for all, a machine's for a ticket.

A machine that is in the mesh gets a newer certificate for the same key without one.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from meshnet_core import certificates
from meshnet_core.certificates import Authority, request_owner
from meshnet_core.errors import InvalidInputError, TicketRefusedError
from meshnet_core.mesh_folder import MeshFolder
from meshnet_tracker.tickets import Tickets

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Enrollment:
    """What a tracker of a mesh can do for machines.

    Attributes:
        authority_pem: certificate of the mesh's authority.
        authority: signs; None where its key is elsewhere.
        tickets: takes tokens; None likewise.
    """

    authority_pem: bytes
    authority: Authority | None = None
    tickets: Tickets | None = None

    @classmethod
    def of(cls, folder: MeshFolder) -> Enrollment:
        """What the files of ``folder`` allow."""
        authority = folder.authority()
        return cls(folder.authority_path.read_bytes(), authority, None if authority is None else tickets_of(folder))

    def describe(self) -> dict[str, object]:
        """JSON-ready, for anyone: the certificate, which a ticket's pin tells to be the right one."""
        return {"authority": self.authority_pem.decode(), "lets_machines_in": self.authority is not None}

    def certify(self, request_pem: str, token: str | None, caller: str | None) -> bytes:
        """A certificate, PEM, for a request.

        Args:
            request_pem: as `certificates.make_request` makes it.
            token: of a ticket; None from a machine that is in the mesh already.
            caller: owner id of the machine that asks, where it showed a certificate.

        Raises:
            InvalidInputError: the request is none.
            TicketRefusedError: the token is not good, or there is neither one nor a certificate of the same key; or
                this tracker cannot sign.
        """
        if self.authority is None or self.tickets is None:
            raise TicketRefusedError(
                "this tracker lets nobody in: the key of the mesh's authority is on the machine where the mesh was "
                "made; join through a tracker there"
            )
        owner = request_owner(request_pem.encode())
        certificate = self.authority.sign(request_pem.encode(), certificates.utc_now())  # before a use is spent on it
        name = certificates.common_name(certificate)
        if token is not None:
            self.tickets.take(token, owner)
            logger.info("machine %s (%s) joined the mesh", name, owner[:16])
        elif caller == owner:
            logger.info("machine %s (%s) has a new certificate", name, owner[:16])
        else:
            raise TicketRefusedError("a machine that is not in the mesh yet needs a ticket, see `meshnet mesh ticket`")
        return certificate


def tickets_of(folder: MeshFolder) -> Tickets:
    """Makes and takes the tickets of a mesh.

    Raises:
        InvalidInputError: the authority's key is not here.
    """
    authority = folder.authority()
    if authority is None:
        raise InvalidInputError(
            f"{folder.path} holds no key of the mesh's authority; tickets are made where `meshnet mesh create` was run"
        )
    return Tickets(authority.secret_for("tickets"), folder.spent_path, time.time)
