"""`meshnet mesh`: the authority that lets machines into a mesh, and what this machine has of one."""

from __future__ import annotations

import json
import re
import socket
from typing import Annotated, Any

import typer

from meshnet_cli import complaint, options, trust
from meshnet_cli.complaint import CommandFailedError
from meshnet_core.errors import InvalidInputError
from meshnet_core.ids import check_id

app = typer.Typer(help="Make a mesh, let machines in, and show what this machine has of one.", no_args_is_help=True)
MachineName = Annotated[
    str | None, typer.Option("--machine", metavar="NAME", help="This machine's name.", show_default="its host name")
]


@app.command()
def create(
    name: Annotated[str, typer.Option("--name", help="The mesh's name, for people.")] = "home",
    machine: MachineName = None,
    mesh: options.MeshPath = None,
    as_json: options.Json = False,
) -> None:
    """Make a mesh: its authority, and this machine as the first in it."""
    from meshnet_core.mesh_folder import MeshFolder, default_path

    folder = MeshFolder(mesh or default_path())
    folder.create(check_id(name, "--name"), machine_name(machine))
    if as_json:
        typer.echo(json.dumps({"mesh": name, "pin": folder.pin(), "folder": str(folder.path)}, indent=2))
        return
    typer.echo(
        f"made mesh {name} in {folder.path}\n"
        f"keep {folder.authority_key_path} to yourself: whoever has it can let machines in\n"
        "next: meshnet tracker --host 0.0.0.0, and meshnet mesh ticket for each machine that is to join"
    )


@app.command()
def ticket(
    tracker: Annotated[
        list[str] | None,
        typer.Option(
            "--tracker",
            metavar="URL",
            help="Where the new machine finds a tracker; may be given several times.",
            show_default="where this machine's trackers were last, else looked for on the local network",
        ),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Name no tracker: the new machine looks for one on its local network.")
    ] = False,
    valid: Annotated[str, typer.Option("--valid", metavar="TIME", help="For how long, such as 30m, 1h or 7d.")] = "1h",
    uses: Annotated[int, typer.Option("--uses", min=1, max=1000, metavar="N", help="For how many machines.")] = 1,
    mesh: options.MeshPath = None,
    as_json: options.Json = False,
) -> None:
    """Make a ticket with which a machine joins; pass it on like a password."""
    from meshnet_core.join_ticket import MAX_TRACKERS, JoinTicket
    from meshnet_core.mesh_folder import MeshFolder, default_path
    from meshnet_tracker.enrollment import tickets_of

    folder = MeshFolder(mesh or default_path())
    tickets = tickets_of(folder)
    if search and tracker:
        raise InvalidInputError("--search names no tracker, --tracker does; give one of them")
    dialled = [] if search else tracker or [url for url in folder.trackers() if not trust.is_loopback_url(url)]
    known = tuple(dialled)[:MAX_TRACKERS]
    valid_s = seconds(valid)
    made = JoinTicket(folder.pin(), tickets.issue(valid_s, uses), known)
    if as_json:
        told = {"ticket": str(made), "valid_s": valid_s, "uses": uses, "trackers": list(known)}
        typer.echo(json.dumps(told, indent=2))
        return
    typer.echo(str(made))
    complaint.say(
        f"for {'one machine' if uses == 1 else f'{uses} machines'}, within {valid}: meshnet join TICKET; "
        f"trackers: {', '.join(known) or 'looked for on the local network'}"
    )


def seconds(text: str) -> float:
    """A span of time as people type it, in seconds.

    Raises:
        InvalidInputError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if found is None:
        raise InvalidInputError(f"--valid {text!r} is no time; write it like 30m, 1h or 7d")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[found[2]]


@app.command()
def show(
    mesh: options.MeshPath = None,
    as_json: options.Json = False,
) -> None:
    """Show which mesh this machine is in, as whom, until when, and where its trackers are."""
    from meshnet_core import certificates

    identity = trust.identity_in(mesh)
    if identity is None:
        raise CommandFailedError(
            "this machine is in no mesh; make one with `meshnet mesh create`, or join one with `meshnet join TICKET`"
        )
    folder = identity.folder
    certificate = folder.certificate_path.read_bytes()
    lines: dict[str, Any] = {
        "mesh": certificates.common_name(folder.authority_path.read_bytes()),
        "pin": folder.pin(),
        "machine": certificates.common_name(certificate),
        "machine id": certificates.owner_of_pem(certificate),
        "until": f"{certificates.expires_at(certificate):%Y-%m-%d}",
        "lets machines in": folder.authority_key_path.exists(),
        "trackers": list(folder.trackers()),
        "folder": str(folder.path),
    }
    if as_json:
        typer.echo(json.dumps({key.replace(" ", "_"): value for key, value in lines.items()}, indent=2))
        return
    lines["until"] += ", renewed before by itself"
    lines["lets machines in"] = "yes" if lines["lets machines in"] else "no"
    lines["trackers"] = ", ".join(lines["trackers"]) or "none known"
    for key, value in lines.items():
        typer.echo(f"{key + ':':<17} {value}")


def machine_name(given: str | None) -> str:
    """The name given, or one made of the host's."""
    if given is not None:
        return check_id(given, "--machine")
    return re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname().partition(".")[0])[:64] or "machine"
