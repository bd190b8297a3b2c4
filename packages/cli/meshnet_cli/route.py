"""`meshnet route`: which nodes would answer for a model now, and why those."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshnet_cli import find_trackers, options, trust
from meshnet_cli.complaint import CommandFailedError
from meshnet_core.demand import USUAL_POSITIONS, Demand
from meshnet_core.errors import LayersUnavailableError

if TYPE_CHECKING:
    from rich.table import Table

    from meshnet_core.route_explanation import RouteExplanation, Speed


def route(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name under which the mesh serves it.")],
    tracker: options.TrackerUrls = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show what was weighed: each hop's price, the others, who was left out.")
    ] = False,
    as_json: options.Json = False,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", metavar="NODE", help="Leave a node out; may be given several times."),
    ] = None,
    prompt: Annotated[
        int, typer.Option("--prompt", min=0, metavar="N", help="Tokens that the prompt is taken to have.")
    ] = USUAL_POSITIONS,
    answer: Annotated[
        int, typer.Option("--answer", min=1, metavar="N", help="Tokens that the answer is expected to have.")
    ] = USUAL_POSITIONS,
    mesh: options.MeshPath = None,
    insecure: options.Insecure = False,
) -> None:
    """Show the route that a generation for MODEL would take now; nothing is sent to the nodes."""
    from meshnet_core.route_explanation import explain_route

    identity = trust.identity_for(options.LOOPBACK, mesh, insecure=insecure, command="route")
    snapshot = asyncio.run(find_trackers.snapshot_of(options.tracker_urls(tracker), identity, insecure=insecure))
    if not snapshot.nodes:
        raise CommandFailedError(find_trackers.NO_NODES)
    try:
        told = explain_route(snapshot, model, frozenset(without or ()), demand=Demand(prompt, answer))
    except LayersUnavailableError as error:
        raise CommandFailedError(
            f"{error.message}; start one that holds them: `meshnet node MODEL --layers FIRST-LAST`, or --layers auto"
        ) from error
    if as_json:
        document = told.to_json()
        wanted = document if explain else {key: document[key] for key in ("model", "fingerprint", "route", "hops")}
        print(json.dumps(wanted, indent=2))
    elif explain:
        _show(told)
    else:
        print(told.route)


def _show(told: RouteExplanation) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else options.PIPED_WIDTH)
    console.print(f"{told.route}   {told.ms_per_token:.2f} ms for each token of an answer of {told.demand.answer}")
    console.print(
        f"to a prompt of {told.demand.prompt}, whose prefill is shared out over them; whom a gateway blames, and its "
        "own links, are not known here",
        style="dim",
    )
    console.print(_hops(told))
    console.print(_candidates(told))
    for runner_up in told.runners_up:
        more = 100 * (runner_up.ms_per_token / max(told.ms_per_token, 1e-9) - 1)
        console.print(
            f"without {runner_up.without}: {runner_up.route}   {runner_up.ms_per_token:.2f} ms, {more:+.0f} %"
        )
    if not told.runners_up:
        console.print("no other route: nobody covers for any of its nodes")
    for one in told.left_out:
        console.print(f"left out: {one.node} with layers {one.held}: it {one.why}")


def _hops(told: RouteExplanation) -> Table:
    table = _table(
        "milliseconds of each hop", "node", "layers", "ms per layer", "all layers", "link", "queue", "room", "sum"
    )
    for hop in told.hops:
        link = f"{hop.link_ms:.2f}" + (f" ±{hop.link_sd:.2f}" if hop.link_sd is not None else "")
        table.add_row(
            hop.node,
            hop.layers if hop.layers == hop.held else f"{hop.layers} of {hop.held}",
            _speed(hop.speed),
            f"{hop.layers_ms:.2f}",
            f"{link} from {hop.link_from}" + ("" if hop.link_measured else ", not measured"),
            f"{hop.queue_ms:.2f}",
            _room(hop.room_ms, hop.load_ms),
            f"{hop.total_ms:.2f}",
        )
    return table


def _candidates(told: RouteExplanation) -> Table:
    table = _table("who could serve", "", "node", "holds", "dtype", "ms per layer", "sessions", "queue", "room")
    for one in told.candidates:
        table.add_row(
            "*" if one.chosen else "",
            one.node,
            one.held,
            one.dtype,
            _speed(one.speed),
            str(one.sessions),
            f"{one.queue_ms:.2f}",
            _room(one.room_ms, one.load_ms),
        )
    return table


def _speed(speed: Speed) -> str:
    if speed.sd is None:
        return f"{speed.ms_per_layer:.3f}, not measured"
    return f"{speed.ms_per_layer:.3f} ±{speed.sd:.3f} of {speed.samples}, {speed.age_s:.0f} s ago"


def _room(room_ms: float, load_ms: float) -> str:
    return f"{room_ms:.2f}" + (f" + {load_ms:.0f} to load" if load_ms else "")


def _table(title: str, *columns: Any) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    return table
