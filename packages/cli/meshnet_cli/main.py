"""The `meshnet` command: puts the subcommands together and shows errors. Knows nothing of what they do.

Each subcommand is a module of its own that imports what it needs when it runs, so that `meshnet --help` is quick and
a machine with only a tracker or a gateway never imports torch.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from meshnet_cli import (
    bench,
    chat,
    complaint,
    config,
    demo,
    doctor,
    events,
    gateway,
    join,
    mesh,
    node,
    nodes,
    plan,
    route,
    settings,
    status,
    tracker,
    up,
    verify,
)
from meshnet_core import __version__

app = typer.Typer(
    name="meshnet",
    cls=settings.ConfiguredGroup,
    help="Run one language model across the machines you own, when no single one of them can hold it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # `complaint` shows errors
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"meshnet {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    del version  # answered by its callback


app.command("up")(up.up)
app.command("chat")(chat.chat)
app.command("status")(status.status)
app.command("nodes")(nodes.nodes)
app.command("events")(events.events)
app.command("tracker")(tracker.tracker)
app.command("node")(node.node)
app.command("gateway")(gateway.gateway)
app.command("route")(route.route)
app.command("join")(join.join)
app.add_typer(mesh.app, name="mesh")
app.command("plan")(plan.plan)
app.command("verify")(verify.verify)
app.command("bench")(bench.bench)
app.command("config")(config.config)
app.command("doctor")(doctor.doctor)
app.command("demo", hidden=True)(demo.demo)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 when all went well, 2 for input that cannot be right, 1 for other failures."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # where a locale cannot say all that a model does, "?" stands for it
            stream.reconfigure(errors="replace")
    sys.exit(complaint.run(typer.main.get_command(app), arguments))
