"""`meshnet node`: ranges of layers of one model or several, served over HTTP and announced to a tracker."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from meshnet_cli import access, find_trackers, lifeline, options, serving, trust
from meshnet_cli.node_shards import ShardChoice, WeightsWanted, load_pool
from meshnet_cli.progress import progress_reporter
from meshnet_cli.session_limits import (
    DEFAULT_DRAIN_GRACE_S,
    DEFAULT_MAX_SESSIONS,
    DEFAULT_SESSION_TTL_S,
    SessionLimits,
    parse_bytes,
)
from meshnet_core.errors import InvalidInputError
from meshnet_core.ids import check_id
from meshnet_core.layer_range import LayerRange
from meshnet_core.web_address import is_web_address
from meshnet_core.wire_form import WireForm

if TYPE_CHECKING:
    from meshnet_gateway.api_keys import ApiKeys

AUTO = "auto"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where and as what a node is known.

    Attributes:
        node_id: its name in the mesh, the same over restarts on one port.
        host, sock: what it listens on.
        url: where others dial it.
        trackers: addresses of the trackers, the preferred one first.
        api: listens for the API's clients, where a gateway is mounted in this process.
        identity: as which machine of a mesh it speaks; None without certificates.
        keys: that the API takes; None lets everybody in.
        wire: in which form frames go to the nodes after it; lean streams are taken only where it is that.
    """

    node_id: str
    host: str
    sock: socket.socket
    url: str
    trackers: tuple[str, ...]
    api: socket.socket | None
    identity: trust.Identity | None = None
    keys: ApiKeys | None = None
    wire: WireForm = WireForm.STREAM


def node(
    model: options.Model,
    layers: Annotated[
        str,
        typer.Option(
            "--layers", metavar="FIRST-LAST", help=f"Which layers, such as 0-20; {AUTO} leaves it to the tracker."
        ),
    ],
    tracker: options.TrackerUrls = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            "--also",
            metavar="MODEL@FIRST-LAST",
            help="One more shard to serve, of this model or another one; may be given several times.",
        ),
    ] = None,
    max_loaded_shards: Annotated[
        int | None,
        typer.Option(
            "--max-loaded-shards",
            min=1,
            metavar="N",
            help="How many shards are in memory at once; the others are loaded when they are asked for, in place of "
            "the one that was not used for longest.",
            show_default="all of them",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help=f"With --layers {AUTO}: what weights and sessions may take, such as 6GiB.",
            show_default="four fifths of what is free",
        ),
    ] = None,
    host: options.Host = options.LOOPBACK,
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, help="Port; 0 takes any free one.", show_default="7410 or above"),
    ] = None,
    advertise: Annotated[
        str | None, typer.Option("--advertise", metavar="URL", help="Where others dial this node.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name in the mesh.", show_default="this machine's, and the port")
    ] = None,
    api: Annotated[
        bool,
        typer.Option(
            "--api", help="Serve the API of a gateway too, from this process; a dashboard has only `meshnet gateway`."
        ),
    ] = False,
    api_port: Annotated[
        int | None,
        typer.Option(
            "--api-port", min=0, max=65535, help="Port of that API.", show_default=str(options.DEFAULT_GATEWAY_PORT)
        ),
    ] = None,
    dtype: options.Dtype = options.DtypeChoice.AUTO,
    quantize: options.Quantize = options.QuantizeChoice.AUTO,
    compile_: options.Compile = options.CompileChoice.AUTO,
    device: options.Device = "auto",
    threads: options.Threads = None,
    cache_bytes: options.CacheBytes = None,
    max_sessions: options.MaxSessions = DEFAULT_MAX_SESSIONS,
    max_sessions_per_peer: Annotated[
        int | None,
        typer.Option(
            "--max-sessions-per-peer",
            min=1,
            metavar="N",
            help="How many of them each gateway may have.",
            show_default="all of them",
        ),
    ] = None,
    session_ttl: options.SessionTtl = DEFAULT_SESSION_TTL_S,
    prefix_reuse: options.PrefixReuse = True,
    drain_grace: Annotated[
        float,
        typer.Option(
            "--drain-grace",
            metavar="SECONDS",
            help="How long running sessions have to move elsewhere when the node is told to stop (SIGTERM, Ctrl-C); "
            "being told again ends it at once.",
        ),
    ] = DEFAULT_DRAIN_GRACE_S,
    wire: options.Wire = WireForm.STREAM,
    mesh: options.MeshPath = None,
    insecure: options.Insecure = False,
    api_key: options.ApiKeys = None,
    api_keys_file: options.ApiKeysFile = None,
    no_api_key: options.NoApiKey = False,
) -> None:
    """Hold some layers of MODEL and serve them to a mesh."""
    lifeline.hold_on()
    serving.set_up_logging()
    choices = [] if layers == AUTO else [ShardChoice(model, LayerRange.parse(layers))]
    choices += map(ShardChoice.parse, also or ())
    room = _memory(memory, layers, alone=not also and max_loaded_shards is None)
    limits = replace(
        SessionLimits.given(cache_bytes, max_sessions, session_ttl, drain_grace, prefix_reuse=prefix_reuse),
        max_sessions_per_peer=max_sessions_per_peer,
    )
    if advertise is not None and not is_web_address(advertise):
        raise InvalidInputError(f"--advertise {advertise!r} is no address; write it like http://10.0.0.7:7410")
    if api_port is not None and not api:
        raise InvalidInputError("--api-port is the port of the API that --api serves; give both or neither")
    identity = trust.identity_for(host, mesh, insecure=insecure, command="node")
    scheme = trust.scheme_of(identity)
    if advertise is not None and not advertise.startswith(f"{scheme}://"):
        raise InvalidInputError(f"--advertise {advertise} must begin with {scheme}://, which this node speaks")
    given_keys = access.KeyOptions(api_key or (), api_keys_file, no_api_key)
    if given_keys != access.KeyOptions() and not api:
        raise InvalidInputError("--api-key, --api-keys-file and --no-api-key are about the API that --api serves")
    keys = access.keys_for(host, given_keys, insecure=insecure) if api else None
    # Before the model is loaded for a minute.
    trackers = asyncio.run(find_trackers.trackers_for(options.tracker_urls(tracker), identity, insecure=insecure))
    if (said := out_of_reach(host, advertise, trackers[0])) is not None:
        logger.warning("%s", said)
    sock = serving.listen_from(host, options.FIRST_NODE_PORT) if port is None else serving.listen(host, port)
    got = serving.port_of(sock)
    place = Place(
        node_id=check_id(name, "--name") if name else _default_name(got),
        host=host,
        sock=sock,
        url=(advertise or serving.reachable_url(host, got, towards=trackers[0], scheme=scheme)).rstrip("/"),
        trackers=tuple(trackers),
        api=_listen_for_api(host, api_port) if api else None,
        identity=identity,
        keys=keys,
        wire=wire,
    )
    weights = WeightsWanted(dtype.value, quantize.value, compile_.value)
    with progress_reporter() as report:
        report("", "starting torch", 0, 1)
        lane_threads = _start_torch(threads)
        auto = None
        if choices:
            pool = load_pool(choices, max_loaded_shards, weights, device, report)
        else:
            from meshnet_cli.auto_layers import AutoLayers

            auto = AutoLayers(model, room, weights, device, report)
            pool = asyncio.run(auto.load(place))
    from meshnet_cli.node_process import serve

    gc.collect()
    gc.freeze()
    asyncio.run(serve(place, pool, limits, lane_threads, auto))
    serving.leave_at_once()


def out_of_reach(host: str, advertise: str | None, tracker: str) -> str | None:
    """What is wrong with a node of a mesh on several machines that listens for its own alone; None where nothing is."""
    if advertise is not None or not trust.is_loopback(host) or trust.is_loopback_url(tracker):
        return None
    return (
        f"this node listens on {host}, where no other machine reaches it, and its tracker is at {tracker}: give it "
        "--host 0.0.0.0, or say with --advertise where others dial it"
    )


def _memory(given: str | None, layers: str, *, alone: bool) -> int | None:
    if layers == AUTO and not alone:
        raise InvalidInputError(
            f"--layers {AUTO} chooses one shard; it goes with neither --also nor --max-loaded-shards"
        )
    if given is not None and layers != AUTO:
        raise InvalidInputError(f"--memory is for --layers {AUTO}; the layers that are given take what they take")
    return None if given is None else parse_bytes(given, option="--memory")


def _listen_for_api(host: str, port: int | None) -> socket.socket:
    return serving.listen(host, options.DEFAULT_GATEWAY_PORT if port is None else port, option="--api-port")


def _default_name(port: int) -> str:
    machine = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname().partition(".")[0])
    return check_id(f"{machine[:50] or 'node'}-{port}", "node id")


def _start_torch(threads: int | None) -> int:
    """Import all that a node needs; the CPU threads that its frames are to run with, torch's own choice if not told.

    Every other thread of the process gets one, this one included: see `meshnet_node.forward_lane.ForwardLane`.

    Hundreds of thousands of objects come with torch and transformers, and stay. Collecting garbage while they are made
    takes a second of each start, and looking through them in every full collection afterwards a pause in somebody's
    answer; so they are made without it, and then frozen.
    """
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # read once, when torch is imported
    gc.disable()
    import torch

    import meshnet_cli.node_process  # noqa: F401  so that it serves at once when it has its layers
    import meshnet_node.shard_loader  # noqa: F401
    from meshnet_node.cpu_threads import take_cpu_threads
    from meshnet_node.device_memory import share_heap

    share_heap()
    gc.freeze()
    gc.enable()
    lane_threads = threads or torch.get_num_threads()
    take_cpu_threads(1)
    return lane_threads
