"""`meshnet doctor`: what is wrong on this machine and in its mesh, and what to do about it."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshnet_cli import options, settings, variables
from meshnet_cli.complaint import FAILURE
from meshnet_core.errors import InvalidInputError

if TYPE_CHECKING:
    from meshnet_cli.doctor_findings import Finding


def doctor(
    context: typer.Context,
    tracker: options.TrackerUrls = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="A model to open, as `meshnet node` would.")
    ] = None,
    device: options.Device = "auto",
    as_json: options.Json = False,
    mesh: options.MeshPath = None,
) -> None:
    """Look for what is wrong on this machine and in its mesh; exit code 1 where something is."""
    from meshnet_cli.doctor_checks import findings
    from meshnet_cli.doctor_findings import Level
    from meshnet_cli.doctor_gather import gather
    from meshnet_core.mesh_folder import MeshFolder, default_path

    root = context.find_root().command
    facts = asyncio.run(
        gather(
            options.tracker_urls(tracker),
            MeshFolder(mesh or default_path()),
            model=model,
            device=device,
            known_variables=_known_variables(root),
            settings_error=_settings_error(root),
        )
    )
    found = findings(facts)
    wrong = [one for one in found if one.level is Level.WRONG]
    if as_json:
        print(json.dumps({"wrong": len(wrong), "findings": [one.to_json() for one in found]}, indent=2))
    else:
        _show(found)
        print(
            "nothing is wrong" if not wrong else f"{len(wrong)} {'thing is' if len(wrong) == 1 else 'things are'} wrong"
        )
    if wrong:
        raise typer.Exit(FAILURE)


def _known_variables(root: Any) -> list[str]:
    """The names of all that are read."""
    return sorted({*variables.FIXED, *(name for one in settings.settings_of(root) for name in one.names)})


def _settings_error(root: Any) -> str | None:
    """What is wrong with the settings' file, if anything is."""
    try:
        settings.defaults_from_file(root)
    except InvalidInputError as error:
        return error.message
    return None


def _show(found: list[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    styles = {"ok": "green", "note": "yellow", "wrong": "bold red"}
    for one in found:
        console.print(Text.assemble((f"{one.level.value:<6}", styles[one.level.value]), f"{one.check}: {one.what}"))
        if one.remedy:
            console.print(Text(f"      -> {one.remedy}"))
