"""`meshnet up`: a whole mesh on this machine with one command, gone when the command is.

It takes the options of its nodes and its gateway, but those that mean nothing where one machine holds all and serves
itself alone (`--host`, certificates, `--memory`, `--drain-grace` and the like; each has its reason in
`tests/unit/test_cli_up_options.py`). Keys for its API are in MESHNET_API_KEY, which its gateway reads as any does.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Annotated

import typer

from meshnet_cli import lifeline, options, serving, splits, tracing
from meshnet_cli.complaint import say
from meshnet_cli.gateway import dashboard_at
from meshnet_cli.session_limits import DEFAULT_MAX_SESSIONS, DEFAULT_SESSION_TTL_S, SessionLimits
from meshnet_core.errors import InvalidInputError
from meshnet_core.layer_range import LayerRange
from meshnet_core.wire_form import WireForm
from meshnet_gateway.recovery import Replay
from meshnet_gateway.speculation import AUTO, Speculate

DEFAULT_NODES = 2


class StoppedError(KeyboardInterrupt):
    """SIGTERM or SIGINT asked this command to end.

    A `KeyboardInterrupt`, since an event loop that runs just then would log any other exception and go on.
    """


def up(
    model: options.Model,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, metavar="N", help="How many nodes.", show_default=str(DEFAULT_NODES))
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--splits",
            metavar="RANGES",
            help="Layers of each node, such as 0-14,15-29; they may overlap.",
            show_default="even",
        ),
    ] = None,
    port: Annotated[int, options.port("the API")] = options.DEFAULT_GATEWAY_PORT,
    dtype: options.Dtype = options.DtypeChoice.AUTO,
    quantize: options.Quantize = options.QuantizeChoice.AUTO,
    compile_: options.Compile = options.CompileChoice.AUTO,
    device: options.Device = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads", min=1, metavar="N", help="CPU threads of each node.", show_default="a share of the cores"
        ),
    ] = None,
    cache_bytes: options.CacheBytes = None,
    max_sessions: options.MaxSessions = DEFAULT_MAX_SESSIONS,
    session_ttl: options.SessionTtl = DEFAULT_SESSION_TTL_S,
    prefix_reuse: options.PrefixReuse = True,
    recovery: options.Recovery = Replay.FAST,
    step_deadline: options.StepDeadline = options.DEFAULT_STEP_DEADLINE_S,
    speculate: options.Speculate = str(AUTO),
    dashboard: options.Dashboard = True,
    wire: options.Wire = WireForm.STREAM,
    traces: options.Traces = None,
) -> None:
    """Start a tracker, nodes and a gateway on this machine, and serve MODEL at /v1."""
    lifeline.hold_on()
    # All nodes leave together, so that there is nowhere to move to.
    limits = SessionLimits.given(cache_bytes, max_sessions, session_ttl, drain_grace_s=0, prefix_reuse=prefix_reuse)
    stop_on_signals()
    try:
        form = ("--wire", wire.value)
        computing = ("--dtype", dtype.value, "--quantize", quantize.value, "--compile", compile_.value)
        node_options = (*computing, "--device", device, *limits.arguments(), *form)
        page = "--dashboard" if dashboard else "--no-dashboard"
        drafts = ("--speculate", str(Speculate.parse(speculate)))
        mending = ("--recovery", recovery.value, "--step-deadline", f"{step_deadline:g}")
        tracing.endpoint_of(traces, {})  # refused before anything begins
        spans = () if traces is None else ("--traces", traces)
        gateway_options = (*mending, *drafts, page, *form, *spans)
        _up(model, nodes, split, port, node_options, threads, gateway_options, dashboard=dashboard)
    except StoppedError:
        say("stopped")


def _up(
    model: str,
    nodes: int | None,
    split: str | None,
    port: int,
    node_options: tuple[str, ...],
    threads: int | None,
    gateway_options: tuple[str, ...],
    *,
    dashboard: bool,
) -> None:
    from meshnet_cli.child_progress import showing_children
    from meshnet_cli.local_mesh import LocalMesh, Plan, threads_each

    ranges = plan_splits(model, nodes, split)
    # The gateway will take it; here a port in use is known before anything is started.
    serving.listen(options.LOOPBACK, port).close()
    plan = Plan(model, ranges, port, node_options, threads or threads_each(len(ranges)), gateway_options)
    with LocalMesh(plan) as mesh:
        with showing_children() as show:
            mesh.start(show)
        at = "" if mesh.api_url == options.DEFAULT_API_URL else f" --url {mesh.api_url}"
        say(
            f"layers {', '.join(map(str, ranges))} on {len(ranges)} nodes, logs in {mesh.folder}; try: meshnet chat{at}"
        )
        if dashboard:
            page = dashboard_at(mesh.api_url.removesuffix("/v1"))
            say("dashboard: " + (page or "not installed; pip install 'meshnet[dashboard]' brings it"))
        print(f"ready {mesh.api_url}", flush=True)
        mesh.watch()


def plan_splits(model: str, nodes: int | None, split: str | None) -> tuple[LayerRange, ...]:
    """The layers of each node, checked against the model before anything is started.

    Raises:
        MeshnetError: the model cannot be opened or is not supported, or the split does not cover it or cuts it where it
            cannot be cut.
    """
    from meshnet_cli.progress import progress_reporter
    from meshnet_node.model_files import open_model

    given = LayerRange.parse_all(split) if split is not None else None
    if given is not None and nodes is not None and nodes != len(given):
        raise InvalidInputError(f"--nodes {nodes} and --splits with {len(given)} ranges disagree; give one of them")
    with progress_reporter() as report:
        report("", f"opening {model}", 0, 1)
        files = open_model(model)
        from meshnet_node import family_support  # here, since it takes another second

        cuts = family_support.cuts_in(files.config)
    ranges = given or splits.even_split(files.num_layers, nodes or min(DEFAULT_NODES, len(cuts) + 1), cuts)
    splits.check_cover(ranges, files.num_layers)
    for layers in ranges:
        family_support.check_config(files.config, layers)
    return ranges


def stop_on_signals() -> None:
    """From now on SIGINT and SIGTERM raise `StoppedError` in the main thread, once; further ones are ignored, so that
    nothing interrupts the stopping of children."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise StoppedError

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)
