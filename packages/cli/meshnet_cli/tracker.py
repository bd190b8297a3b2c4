"""`meshnet tracker`: who is where, in one process. Needs no torch."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from meshnet_cli import lifeline, mdns, options, renewal, serving, trust
from meshnet_core import __version__
from meshnet_core.errors import InvalidInputError
from meshnet_core.web_address import is_web_address
from meshnet_tracker.registry import RegistryAddress

if TYPE_CHECKING:
    from meshnet_core.clock import Clock
    from meshnet_tracker.directory import Directory
    from meshnet_tracker.sharing import Sharing


def tracker(
    host: options.Host = options.LOOPBACK,
    port: Annotated[int, options.port("the tracker")] = options.DEFAULT_TRACKER_PORT,
    mesh: options.MeshPath = None,
    insecure: options.Insecure = False,
    advertise: Annotated[
        str | None,
        typer.Option(
            "--advertise",
            metavar="URL",
            help="Where others dial this tracker; put into join tickets, and told to the other trackers.",
        ),
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option(
            "--registry",
            metavar="URL",
            help="A Redis through which several trackers share one list of nodes, such as redis://10.0.0.5:6379/0.",
            show_default="none: this tracker keeps its list alone",
        ),
    ] = None,
    announce: options.Announce = True,
) -> None:
    """Keep the list of nodes, and give routes over them to gateways."""
    lifeline.hold_on()
    serving.set_up_logging()
    identity = trust.identity_for(host, mesh, insecure=insecure, command="tracker")
    shared = None if registry is None else RegistryAddress.parse(registry)
    sock = serving.listen(host, port)
    scheme = trust.scheme_of(identity)
    if advertise is not None and not is_web_address(advertise):
        raise InvalidInputError(f"--advertise {advertise!r} is no address; write it like {scheme}://10.0.0.5:7400")
    if advertise is not None and not advertise.startswith(f"{scheme}://"):
        raise InvalidInputError(f"--advertise {advertise} must begin with {scheme}://, which this tracker speaks")
    asyncio.run(_serve(host, sock, identity, advertise, shared, announce=announce))


async def _serve(
    host: str,
    sock: socket.socket,
    identity: trust.Identity | None,
    advertise: str | None,
    registry: RegistryAddress | None,
    *,
    announce: bool,
) -> None:
    from aiohttp import web

    from meshnet_core.clock import SystemClock
    from meshnet_core.connection_log import connection_log
    from meshnet_tracker.directory import Directory
    from meshnet_tracker.server import create_app, new_doorkeeper

    doorkeeper = new_doorkeeper()
    tls = enrollment = None
    port, scheme = serving.port_of(sock), trust.scheme_of(identity)
    addresses = [] if trust.is_loopback(host) else serving.addresses_of(host)
    if identity is not None:
        from meshnet_tracker.enrollment import Enrollment

        tls = identity.credentials.server_context(optional_client=True)
        enrollment = Enrollment.of(identity.folder)
        urls = [serving.url_of(address, port, scheme) for address in addresses or [host]]
        identity.remember([advertise.rstrip("/")] if advertise else urls)
    clock, sharing = SystemClock(), None
    directory = Directory(clock)
    if registry is not None:
        towards = f"//{registry.host}:{registry.port}"
        url = (advertise or serving.reachable_url(host, port, towards=towards, scheme=scheme)).rstrip("/")
        sharing = _sharing(directory, registry, identity, url, clock)
    app = create_app(directory, doorkeeper, enrollment, sharing=sharing)
    stopped = serving.stop_event()
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=serving.SHUTDOWN_S, logger=connection_log("meshnet_tracker.server")
    )
    async with AsyncExitStack() as closing:
        await closing.enter_async_context(serving.serving_aiohttp(runner, sock, tls, doorkeeper))
        await closing.enter_async_context(renewal.keeping_renewed(identity))
        serving.say_ready(serving.url_of(host, port, scheme))
        if announce and addresses:
            pin = None if identity is None else identity.folder.pin()
            await closing.enter_async_context(mdns.announced(mdns.TRACKER, addresses, port, scheme, pin))
        await stopped.wait()
    if sharing is not None:
        await sharing.close()


def _sharing(
    directory: Directory, registry: RegistryAddress, identity: trust.Identity | None, url: str, clock: Clock
) -> Sharing:
    """The directory's sharing with the other trackers of the mesh, which are those with the same authority, or with
    none."""
    from meshnet_core.ids import mint_tracker_id
    from meshnet_tracker.redis_registry import RedisRegistry
    from meshnet_tracker.sharing import Sharing, TrackerInfo

    mesh = "open" if identity is None else identity.folder.pin()
    return Sharing(directory, RedisRegistry(registry, mesh), TrackerInfo(mint_tracker_id(), url, __version__), clock)
