"""`meshnet gateway`: the OpenAI-style API over a mesh. Needs no torch."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Annotated

from meshnet_cli import lifeline, options, serving
from meshnet_gateway.recovery import Replay

if TYPE_CHECKING:
    from fastapi import FastAPI


def gateway(
    tracker: options.TrackerUrl,
    host: options.Host = options.LOOPBACK,
    port: Annotated[int, options.port("the API")] = options.DEFAULT_GATEWAY_PORT,
    recovery: options.Recovery = Replay.FAST,
    step_deadline: options.StepDeadline = options.DEFAULT_STEP_DEADLINE_S,
) -> None:
    """Serve the OpenAI-style API of a mesh at /v1."""
    lifeline.hold_on()
    serving.set_up_logging()
    sock = serving.listen(host, port)
    asyncio.run(_serve(tracker, host, sock, recovery, step_deadline))


async def _serve(tracker: str, host: str, sock: socket.socket, recovery: Replay, step_deadline_s: float) -> None:
    stopped = serving.stop_event()
    async with api_of(tracker, recovery, step_deadline_s) as app, serving.serving_asgi(app, sock):
        serving.say_ready(f"{serving.url_of(host, serving.port_of(sock))}/v1")
        await stopped.wait()


@asynccontextmanager
async def api_of(
    tracker: str, recovery: Replay = Replay.FAST, step_deadline_s: float = options.DEFAULT_STEP_DEADLINE_S
) -> AsyncIterator[FastAPI]:
    """The API over the mesh of one tracker, with all that it needs behind it, while the block runs.

    Raises:
        TrackerUnreachableError: no tracker answers there.
    """
    import aiohttp

    from meshnet_core.clock import SystemClock
    from meshnet_core.http_transport import HttpTransport
    from meshnet_core.tracker_client import TrackerClient
    from meshnet_gateway.api import create_app
    from meshnet_gateway.generation import GenerationEngine
    from meshnet_gateway.mesh import Mesh
    from meshnet_gateway.text_store import TextStore

    clock = SystemClock()
    async with AsyncExitStack() as closing:
        client = TrackerClient(tracker)
        closing.push_async_callback(client.close)
        await client.snapshot()
        mesh = Mesh(client, clock)
        closing.push_async_callback(mesh.close)
        transport = HttpTransport(clock)
        closing.push_async_callback(transport.close)
        session = await closing.enter_async_context(aiohttp.ClientSession())
        engine = GenerationEngine(mesh, transport, clock, recovery=recovery, step_deadline_s=step_deadline_s)
        yield create_app(engine, TextStore(mesh, session), mesh, room=engine.room)
