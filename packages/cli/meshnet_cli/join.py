"""`meshnet join TICKET`: get this machine a certificate of a mesh. Its key is made here and never leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from meshnet_cli import find_trackers, options
from meshnet_cli.complaint import CommandFailedError
from meshnet_cli.mesh import MachineName, machine_name
from meshnet_core.errors import InvalidInputError, MeshnetError, TicketRefusedError, TrackerUnreachableError
from meshnet_core.join_ticket import JoinTicket

if TYPE_CHECKING:
    from meshnet_core.mesh_folder import MeshFolder

Search = Callable[[str], Awaitable[list[str]]]
"""Finds trackers of the mesh with a pin."""


def join(
    ticket: Annotated[str, typer.Argument(metavar="TICKET", help="As `meshnet mesh ticket` shows it; - reads it.")],
    machine: MachineName = None,
    mesh: options.MeshPath = None,
    as_json: options.Json = False,
) -> None:
    """Join a mesh: this machine gets its own certificate, and knows where the trackers are."""
    from meshnet_core.mesh_folder import MeshFolder, default_path

    parsed = JoinTicket.parse(typer.get_text_stream("stdin").read() if ticket == "-" else ticket)
    folder = MeshFolder(mesh or default_path())
    at = asyncio.run(enroll(parsed, folder, machine_name(machine), find_trackers.of_mesh))
    if as_json:
        typer.echo(json.dumps({"tracker": at, "pin": parsed.pin, "folder": str(folder.path)}, indent=2))
        return
    typer.echo(
        f"joined through {at}; this machine's identity is in {folder.path}\n"
        "next: meshnet node MODEL --layers FIRST-LAST --host 0.0.0.0, or meshnet gateway"
    )


async def enroll(ticket: JoinTicket, folder: MeshFolder, name: str, search: Search) -> str:
    """Get a certificate for a key in ``folder`` and keep it there; returns the tracker's address.

    A key that is there, from a try that failed or from a certificate that ended, is used again.

    Raises:
        InvalidInputError: this machine is in another mesh.
        TicketRefusedError: the trackers that answer do not take the ticket.
        CommandFailedError: no tracker of that mesh answers.
    """
    from meshnet_core import certificates

    if folder.authority_path.exists() and folder.pin() != ticket.pin:
        raise InvalidInputError(
            f"{folder.path} is of another mesh; name another folder with --mesh, or remove that one to leave its mesh"
        )
    key = folder.key_path.read_bytes() if folder.key_path.exists() else certificates.new_key()
    folder.keep_key(key)  # before it is enrolled: a ticket is for one key
    request = certificates.make_request(key, name)
    urls = list(ticket.trackers) or await search(ticket.pin)
    if not urls:
        raise CommandFailedError(
            "the ticket names no tracker, and none of its mesh was found on the local network; "
            "have a ticket made with --tracker URL"
        )
    reasons: list[str] = []
    for url in urls:
        try:
            authority, certificate = await _ask(url, ticket, request)
        except MeshnetError as error:
            if isinstance(error, TicketRefusedError) and len(urls) == 1:
                raise
            reasons.append(f"{url}: {error.message}")
            continue
        folder.store(authority, certificate, key, dict.fromkeys([url, *urls]))
        return url
    raise CommandFailedError("no tracker took the ticket: " + "; ".join(reasons))


async def _ask(url: str, ticket: JoinTicket, request: bytes) -> tuple[bytes, bytes]:
    """The authority's certificate, which is the pinned one, and this machine's."""
    import ssl

    from meshnet_core import certificates
    from meshnet_core.credentials import trusting, trusting_nobody_yet
    from meshnet_core.tracker_client import TrackerClient

    stranger = TrackerClient(url, tls=trusting_nobody_yet())
    try:
        authority = await stranger.authority()
    finally:
        await stranger.close()
    if certificates.pin_of(authority) != ticket.pin:
        raise TrackerUnreachableError("what answers there is not of the ticket's mesh: its pin is another")
    client = TrackerClient(url, tls=trusting(ssl.PROTOCOL_TLS_CLIENT, authority))
    try:
        return authority, await client.enroll(request, ticket.token)
    finally:
        await client.close()
