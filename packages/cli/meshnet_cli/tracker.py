"""`meshnet tracker`: who is where, in one process. Needs no torch."""

from __future__ import annotations

import asyncio
import socket
from typing import Annotated

from meshnet_cli import lifeline, options, serving, trust


def tracker(
    host: options.Host = options.LOOPBACK,
    port: Annotated[int, options.port("the tracker")] = options.DEFAULT_TRACKER_PORT,
    mesh: options.MeshPath = None,
    insecure: options.Insecure = False,
) -> None:
    """Keep the list of nodes, and give routes over them to gateways."""
    lifeline.hold_on()
    serving.set_up_logging()
    identity = trust.identity_for(host, mesh, insecure=insecure, command="tracker")
    sock = serving.listen(host, port)
    asyncio.run(_serve(host, sock, identity))


async def _serve(host: str, sock: socket.socket, identity: trust.Identity | None) -> None:
    from aiohttp import web

    from meshnet_core.clock import SystemClock
    from meshnet_core.connection_log import connection_log
    from meshnet_tracker.directory import Directory
    from meshnet_tracker.server import create_app, new_doorkeeper

    doorkeeper = new_doorkeeper()
    app = create_app(Directory(clock=SystemClock()), doorkeeper)
    tls = None if identity is None else identity.credentials.server_context(optional_client=True)
    stopped = serving.stop_event()
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=serving.SHUTDOWN_S, logger=connection_log("meshnet_tracker.server")
    )
    async with serving.serving_aiohttp(runner, sock, tls, doorkeeper):
        serving.say_ready(serving.url_of(host, serving.port_of(sock), trust.scheme_of(identity)))
        await stopped.wait()
