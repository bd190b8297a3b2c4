"""`meshnet gateway`: the OpenAI-style API over a mesh. Needs no torch."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshnet_cli import access, find_trackers, lifeline, mdns, options, renewal, serving, tracing, trust
from meshnet_core.wire_form import WireForm
from meshnet_gateway.recovery import Replay
from meshnet_gateway.speculation import AUTO, Speculate

if TYPE_CHECKING:
    from fastapi import FastAPI

    from meshnet_gateway.api_keys import ApiKeys


@dataclass(frozen=True)
class Api:
    """How an API is to be.

    Attributes:
        recovery: how lost state is made again.
        step_deadline_s: time for one step, in seconds.
        speculate: how drafts are used.
        identity: as which machine of a mesh its calls to nodes and trackers are made; None without certificates.
        keys: that it takes; None lets everybody in.
        traces: where spans of generations are sent; None leaves it to OpenTelemetry's environment variables.
        dashboard: whether it serves one, where that is installed.
        wire: in which form frames go to the nodes.
    """

    recovery: Replay = Replay.FAST
    step_deadline_s: float = options.DEFAULT_STEP_DEADLINE_S
    speculate: Speculate = AUTO
    identity: trust.Identity | None = None
    keys: ApiKeys | None = None
    traces: str | None = None
    dashboard: bool = False
    wire: WireForm = WireForm.STREAM


@dataclass(frozen=True)
class Front:
    """Where an API is to be met.

    Attributes:
        host, sock: what it listens on.
        tls: what it serves HTTPS with; None for HTTP.
        announce: whether it can be found on the local network.
    """

    host: str
    sock: socket.socket
    tls: serving.TlsFiles | None
    announce: bool

    @property
    def scheme(self) -> str:
        return "http" if self.tls is None else "https"


def gateway(
    tracker: options.TrackerUrls = None,
    host: options.Host = options.LOOPBACK,
    port: Annotated[int, options.port("the API")] = options.DEFAULT_GATEWAY_PORT,
    recovery: options.Recovery = Replay.FAST,
    step_deadline: options.StepDeadline = options.DEFAULT_STEP_DEADLINE_S,
    speculate: options.Speculate = str(AUTO),
    mesh: options.MeshPath = None,
    insecure: options.Insecure = False,
    api_key: options.ApiKeys = None,
    api_keys_file: options.ApiKeysFile = None,
    no_api_key: options.NoApiKey = False,
    tls_certificate: Annotated[
        Path | None,
        typer.Option("--tls-certificate", metavar="FILE", help="Certificate chain, PEM, to serve the API over HTTPS."),
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Its private key, PEM.")] = None,
    announce: options.Announce = True,
    traces: options.Traces = None,
    dashboard: options.Dashboard = True,
    wire: options.Wire = WireForm.STREAM,
) -> None:
    """Serve the OpenAI-style API of a mesh at /v1."""
    lifeline.hold_on()
    serving.set_up_logging()
    # What it listens for are clients with keys; of the mesh it is itself a client.
    identity = trust.identity_for(options.LOOPBACK, mesh, insecure=insecure, command="gateway")
    keys = access.keys_for(host, access.KeyOptions(api_key or (), api_keys_file, no_api_key), insecure=insecure)
    tls = serving.tls_files(tls_certificate, tls_key)
    front = Front(host, serving.listen(host, port), tls, announce)
    tracing.endpoint_of(traces, {})  # refused before anything begins
    drafts = Speculate.parse(speculate)
    api = Api(recovery, step_deadline, drafts, identity, keys, traces, dashboard, wire)
    asyncio.run(_serve(options.tracker_urls(tracker), front, api, insecure=insecure))


async def _serve(given: Sequence[str], front: Front, api: Api, *, insecure: bool) -> None:
    trackers = await find_trackers.trackers_for(given, api.identity, insecure=insecure)
    stopped = serving.stop_event()
    async with (
        renewal.keeping_renewed(api.identity),
        api_of(trackers, api) as app,
        serving.serving_asgi(app, front.sock, front.tls),
        _found(front, api),
    ):
        base = serving.url_of(front.host, serving.port_of(front.sock), front.scheme)
        if api.dashboard and (page := dashboard_at(base)) is not None:
            logging.getLogger(__name__).info("dashboard: %s", page)
        serving.say_ready(f"{base}/v1")
        await stopped.wait()


def dashboard_at(base: str) -> str | None:
    """The address of the dashboard of the gateway at ``base``; None where it is not installed."""
    return f"{base}/dashboard" if importlib.util.find_spec("nicegui") else None


@asynccontextmanager
async def _found(front: Front, api: Api) -> AsyncIterator[None]:
    """Announced on the local network, where others can reach it."""
    if not front.announce or trust.is_loopback(front.host):
        yield
        return
    pin = None if api.identity is None else api.identity.folder.pin()
    addresses, port = serving.addresses_of(front.host), serving.port_of(front.sock)
    async with mdns.announced(mdns.API, addresses, port, front.scheme, pin):
        yield


@asynccontextmanager
async def api_of(trackers: Sequence[str], api: Api) -> AsyncIterator[FastAPI]:
    """The API over the mesh of these trackers, with all that it needs behind it, while the block runs.

    Raises:
        TrackerUnreachableError: none of them answers.
    """
    import aiohttp

    from meshnet_core.clock import SystemClock
    from meshnet_core.stream_transport import transport_for
    from meshnet_core.trackers import Trackers
    from meshnet_gateway.api import create_app
    from meshnet_gateway.generation import GenerationEngine
    from meshnet_gateway.mesh import Mesh
    from meshnet_gateway.text_store import TextStore

    clock = SystemClock()
    tls = trust.client_tls(api.identity)
    async with AsyncExitStack() as closing:
        client = Trackers(trackers, tls=tls)
        closing.push_async_callback(client.close)
        await client.snapshot()
        mesh = Mesh(client, clock, tls=tls)
        closing.push_async_callback(mesh.close)
        transport = transport_for(api.wire, clock, tls=tls)
        closing.push_async_callback(transport.close)
        connector = aiohttp.TCPConnector(ssl=tls or True)
        session = await closing.enter_async_context(aiohttp.ClientSession(connector=connector))
        traced = await closing.enter_async_context(tracing.tracing_to(api.traces, clock))
        engine = GenerationEngine(
            mesh,
            transport,
            clock,
            measured=mesh.snapshot,
            recovery=api.recovery,
            step_deadline_s=api.step_deadline_s,
            tracing=traced,
            speculate=api.speculate,
        )
        app = create_app(engine, TextStore(mesh, session), mesh, room=engine.room, keys=api.keys)
        if traced is not None:
            tracing.follow_callers(app)
        if api.dashboard:
            from meshnet_gateway.dashboard.mount import dashboard

            await closing.enter_async_context(dashboard(app, api.keys, clock))
        yield app
