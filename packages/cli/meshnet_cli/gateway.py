"""`meshnet gateway`: the OpenAI-style API over a mesh. Needs no torch."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Annotated

from meshnet_cli import find_trackers, lifeline, options, renewal, serving, trust
from meshnet_gateway.recovery import Replay

if TYPE_CHECKING:
    from fastapi import FastAPI


def gateway(
    tracker: options.TrackerUrls = None,
    host: options.Host = options.LOOPBACK,
    port: Annotated[int, options.port("the API")] = options.DEFAULT_GATEWAY_PORT,
    recovery: options.Recovery = Replay.FAST,
    step_deadline: options.StepDeadline = options.DEFAULT_STEP_DEADLINE_S,
    mesh: options.MeshPath = None,
    insecure: options.Insecure = False,
) -> None:
    """Serve the OpenAI-style API of a mesh at /v1."""
    lifeline.hold_on()
    serving.set_up_logging()
    identity = trust.identity_for(host, mesh, insecure=insecure, command="gateway")
    sock = serving.listen(host, port)
    given = options.tracker_urls(tracker)
    asyncio.run(_serve(given, host, sock, recovery, step_deadline, identity, insecure))


async def _serve(
    given: Sequence[str],
    host: str,
    sock: socket.socket,
    recovery: Replay,
    step_deadline_s: float,
    identity: trust.Identity | None,
    insecure: bool,
) -> None:
    trackers = await find_trackers.trackers_for(given, identity, insecure=insecure)
    stopped = serving.stop_event()
    async with (
        renewal.keeping_renewed(identity),
        api_of(trackers, recovery, step_deadline_s, identity) as app,
        serving.serving_asgi(app, sock),
    ):
        serving.say_ready(f"{serving.url_of(host, serving.port_of(sock))}/v1")
        await stopped.wait()


@asynccontextmanager
async def api_of(
    trackers: Sequence[str],
    recovery: Replay = Replay.FAST,
    step_deadline_s: float = options.DEFAULT_STEP_DEADLINE_S,
    identity: trust.Identity | None = None,
) -> AsyncIterator[FastAPI]:
    """The API over the mesh of these trackers, with all that it needs behind it, while the block runs; its calls are
    made as ``identity``, where this machine has one.

    Raises:
        TrackerUnreachableError: none of them answers.
    """
    import aiohttp

    from meshnet_core.clock import SystemClock
    from meshnet_core.http_transport import HttpTransport
    from meshnet_core.trackers import Trackers
    from meshnet_gateway.api import create_app
    from meshnet_gateway.generation import GenerationEngine
    from meshnet_gateway.mesh import Mesh
    from meshnet_gateway.text_store import TextStore

    clock = SystemClock()
    tls = None if identity is None else identity.credentials.client_context()
    async with AsyncExitStack() as closing:
        client = Trackers(trackers, tls=tls)
        closing.push_async_callback(client.close)
        await client.snapshot()
        mesh = Mesh(client, clock, tls=tls)
        closing.push_async_callback(mesh.close)
        transport = HttpTransport(clock, tls=tls)
        closing.push_async_callback(transport.close)
        connector = aiohttp.TCPConnector(ssl=tls or True)
        session = await closing.enter_async_context(aiohttp.ClientSession(connector=connector))
        engine = GenerationEngine(mesh, transport, clock, recovery=recovery, step_deadline_s=step_deadline_s)
        yield create_app(engine, TextStore(mesh, session), mesh, room=engine.room)
