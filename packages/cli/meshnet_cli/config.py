"""`meshnet config`: every setting with its value and where that comes from."""

from __future__ import annotations

import enum
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from meshnet_cli import options, settings


@dataclass(frozen=True)
class Row:
    """One setting: its command and option, the value, where that comes from, and the variables that would set it."""

    command: str
    option: str
    value: Any
    origin: str
    variables: tuple[str, ...]


def config(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="Those too that are as they are by default.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show the settings and where each comes from: a variable, the file, or the default."""
    path = settings.config_path()
    found = list(rows(context.find_root(), path))
    shown = [row for row in found if everything or row.origin != "default"]
    if as_json:
        print(json.dumps({"file": path and str(path), "settings": [asdict(row) for row in shown]}, indent=2))
        return
    print(f"file: {path or f'none; {settings.usual_path()} would be read'}")
    if not shown:
        print("all is as it is by default; --all shows it, with the variables that would change it")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("command", "option", "value", "from", "variables")
    for row in shown:
        value = "" if row.value is None else str(row.value)
        table.add_row(row.command, f"--{row.option}", value, row.origin, " ".join(row.variables))
    Console(highlight=False, width=None if sys.stdout.isatty() else options.PIPED_WIDTH).print(table)


def rows(root: Any, path: Path | None) -> Iterator[Row]:
    """Every setting as a command would find it that is given no flag.

    Args:
        root: click's context of the whole command line, with the file's values in its default map.
        path: of that file.
    """
    for setting in settings.settings_of(root.command):
        found = root
        for name in setting.path:
            command = found.command.commands[name]
            found = command.make_context(name, [], parent=found, resilient_parsing=True)
        source = found.get_parameter_source(setting.option.name)
        variable = next((name for name in setting.names if os.environ.get(name)), None)
        value, origin = _plain(found.params.get(setting.option.name)), "default"
        if source is not None and source.name == "ENVIRONMENT":
            origin = f"variable {variable}"
            value = os.environ.get(variable or "") if value is None else value  # one that cannot be a value at all
        elif source is not None and source.name == "DEFAULT_MAP":
            origin = f"file {path}"
        yield Row(setting.command, setting.key, value, origin, setting.names)


def _plain(value: Any) -> Any:
    match value:
        case enum.Enum():
            return value.value
        case Path():
            return str(value)
        case list() | tuple():
            return [_plain(one) for one in value]
        case _:
            return value
