"""One node's process: its shards behind the hop service, served over HTTP and announced, until it is told to stop.

The composition alone; what each part does is in the node's own package. Importing it imports torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

import psutil
import torch
import transformers

from meshnet_cli import gateway, renewal, serving
from meshnet_cli.auto_layers import AutoLayers
from meshnet_cli.node import Place
from meshnet_cli.session_limits import MAX_PREFIXES, SessionLimits
from meshnet_core import __version__
from meshnet_core.clock import SystemClock
from meshnet_core.errors import InvalidInputError
from meshnet_core.ids import mint_boot_id
from meshnet_core.membership import NodeInfo
from meshnet_core.stream_transport import transport_for
from meshnet_core.trackers import Trackers
from meshnet_core.wire_form import WireForm
from meshnet_node import torch_server
from meshnet_node.cache_store import CacheStore, StoreLimits
from meshnet_node.device_memory import IdleTrim
from meshnet_node.forward_lane import ForwardLane
from meshnet_node.hop_service import HopService
from meshnet_node.hop_session import HopSession
from meshnet_node.link_probes import LinkProbes
from meshnet_node.peer_sessions import PeerSessions
from meshnet_node.readiness import why_not_ready
from meshnet_node.registration import Registration, RegistrationState
from meshnet_node.sampler import sample
from meshnet_node.shard_pool import ShardPool
from meshnet_node.shard_probes import ShardProbes
from meshnet_node.speed_watch import SpeedWatch
from meshnet_node.steps_here import HERE_S, StepsHere
from meshnet_node.thread_team import team_of

SESSION_SHARE = 0.25  # of the memory that is free once the layers are loaded; several nodes may share a machine
MIN_BODY, MAX_BODY = 16 * 2**20, 512 * 2**20  # bytes of a frame that a node reads, see `_body_limit`
SWEEP_S = 5.0
DRAIN_POLL_S = 0.05

logger = logging.getLogger(__name__)


async def serve(
    place: Place, shards: ShardPool, limits: SessionLimits, threads: int, auto: AutoLayers | None = None
) -> None:
    """Serve with ``threads`` CPU threads until SIGINT or SIGTERM, then drain; leave the tracker and close when no
    session is left, when the grace is over, or when told once more. With ``auto`` the tracker chooses the layers.

    Raises:
        InvalidInputError: more bytes are asked for than the device has.
    """
    clock = SystemClock()
    boot, started = (mint_boot_id(), time.time_ns() // 1_000_000) if auto is None else (auto.boot, auto.started)
    device = torch.device(next(offer.shard.backend.device for offer in shards if offer.shard is not None))
    version = f"{__version__} (torch {torch.__version__}, transformers {transformers.__version__})"
    credentials = None if place.identity is None else place.identity.credentials
    dials = None if credentials is None else credentials.client_context()
    transport = transport_for(place.wire, clock, tls=dials)
    team = team_of(threads)
    lane = ForwardLane(threads=threads, here=None if team is None else StepsHere(HERE_S), team=team)
    service = HopService(
        boot=boot,
        shards=shards,
        store=CacheStore(_store_limits(device, limits, shards.bytes_to_come), clock),
        lane=lane,
        transport=transport,
        sample=sample,
        clock=clock,
    )

    def describe() -> NodeInfo:
        return NodeInfo(
            node_id=place.node_id,
            url=place.url,
            boot=boot,
            started=started,
            version=version,
            device=device.type,
            shards=tuple(offer.info(clock.now()) for offer in shards),
            sessions=len(service.store),
            state_bytes=sum(held.nbytes for held in service.store),
            queued=service.status()["queued"],
            draining=service.draining,
            links=service.links.told(),
            free_bytes=service.store.free_nbytes,
            budget_bytes=service.store.limits.budget_bytes,
            max_sessions=service.store.limits.max_sessions,
            placement=None if auto is None else auto.placeable(),
        )

    client = Trackers(place.trackers, tls=dials)
    registration = Registration(client, describe)

    not_ready = partial(_not_ready, service, registration)

    def status() -> dict[str, Any]:
        about = {"node": place.node_id, "url": place.url, "version": version, "device": str(device)}
        now = {"registered": registration.state is RegistrationState.REGISTERED, "ready": not_ready() is None}
        return {**about, **now, **service.status(), **_placement_status(auto), **_compile_status(shards)}

    def text_files(fingerprint: str) -> dict[str, bytes] | None:
        return next((dict(offer.text_files) for offer in shards if offer.known.fingerprint == fingerprint), None)

    doorkeeper = torch_server.new_doorkeeper()
    app = torch_server.create_app(
        service,
        boot=boot,
        status=status,
        text_files=text_files,
        max_body=_body_limit(shards),
        doorkeeper=doorkeeper,
        peers=_peer_sessions(limits, service),
        not_ready=not_ready,
        streams=place.wire is WireForm.STREAM,
    )
    listens = None if credentials is None else credentials.server_context()
    stops = serving.StopSignals()
    stopped = stops.first
    async with AsyncExitStack() as closing:
        await closing.enter_async_context(renewal.keeping_renewed(place.identity))
        closing.push_async_callback(client.close)
        closing.push_async_callback(transport.close)
        closing.push_async_callback(service.close)
        await closing.enter_async_context(
            serving.serving_aiohttp(torch_server.runner_for(app), place.sock, listens, doorkeeper)
        )
        sweeper = asyncio.create_task(_sweep(service.store, lane))
        closing.callback(sweeper.cancel)
        registration.start()
        closing.push_async_callback(registration.stop)
        for measuring in (
            ShardProbes(shards, lane, clock),
            LinkProbes(lambda: client.neighbours(place.node_id), transport, service.links, clock),
            SpeedWatch(describe, registration.beat),
        ):
            closing.callback(asyncio.create_task(measuring.run()).cancel)
        if auto is not None:
            await closing.enter_async_context(auto.following(shards, service, registration, client, place.node_id))
        if place.api is not None:
            api_app = await closing.enter_async_context(
                gateway.api_of(place.trackers, gateway.Api(identity=place.identity, keys=place.keys, wire=place.wire))
            )
            await closing.enter_async_context(serving.serving_asgi(api_app, place.api))
        while registration.state is not RegistrationState.REGISTERED and not stopped.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        if not stopped.is_set():
            serving.say_ready(place.url)
            if place.api is not None:
                print(f"api {serving.url_of(place.host, serving.port_of(place.api))}/v1", flush=True)
        await stopped.wait()
        await _drain(service, registration, limits.drain_grace_s, stops.second)


async def _drain(service: HopService, registration: Registration, grace_s: float, at_once: asyncio.Event) -> None:
    """Take no new sessions, say so, and wait until those that are here have ended or moved."""
    service.drain()
    if not len(service.store) or grace_s <= 0:
        return
    logger.info(
        "draining: %d sessions have %g s to end or to move; a second SIGTERM or Ctrl-C ends this node at once",
        len(service.store), grace_s,
    )  # fmt: skip
    told = asyncio.create_task(registration.beat())  # at once, so that routes leave this node out
    try:
        async with asyncio.timeout(grace_s):
            while len(service.store) and not at_once.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(at_once.wait(), DRAIN_POLL_S)
    except TimeoutError:
        logger.warning(
            "drained for %g s; %d sessions are still here and will miss their state", grace_s, len(service.store)
        )
    finally:
        told.cancel()
        await asyncio.gather(told, return_exceptions=True)


def _not_ready(service: HopService, registration: Registration) -> str | None:
    return why_not_ready(registration.state, loaded_shards=service.shards.loaded, draining=service.draining)


def _placement_status(auto: AutoLayers | None) -> dict[str, Any]:
    return {} if auto is None else {"placement": auto.status()}


def _compile_status(shards: ShardPool) -> dict[str, Any]:
    """How far each shard's compiled step is, where that was asked for, and which shards have kernels."""
    told = {}
    for offer in shards:
        backend = None if offer.shard is None else offer.shard.backend
        warm_up = getattr(backend, "step_warm_up", None)
        if getattr(backend, "runs_native", False):
            told[str(offer)] = {"state": "native", "seconds": 0.0, "detail": ""}
        if warm_up is not None:
            state, seconds, detail = warm_up.status.state.value, warm_up.elapsed_s, warm_up.status.detail
            if state == "ready" and not getattr(backend, "runs_compiled", True):
                state, detail = "refused", "it failed in a frame, see the log"
            told[str(offer)] = {"state": state, "seconds": round(seconds, 1), "detail": detail}
    return {"compile": told} if told else {}


async def _sweep(store: CacheStore[HopSession], lane: ForwardLane) -> None:
    """Idle sessions go when their time is up, also on a node that nobody calls; and so does memory that was freed."""
    trim = IdleTrim(time.process_time)
    while True:
        trim.look(idle=not lane.queued)  # at once too: loading leaves something
        await asyncio.sleep(SWEEP_S)
        store.sweep()


def _body_limit(shards: ShardPool) -> int:
    """Bytes of body to accept: on the stateless path a frame is a whole sequence, in float32 at most."""
    longest = max(offer.known.max_positions * offer.known.hidden_size * 4 for offer in shards)
    return min(MAX_BODY, max(MIN_BODY, longest))


def _peer_sessions(limits: SessionLimits, service: HopService) -> PeerSessions | None:
    if limits.max_sessions_per_peer is None:
        return None
    return PeerSessions(limits.max_sessions_per_peer, lambda: {held.document.session for held in service.store})


def _store_limits(device: torch.device, limits: SessionLimits, weights_to_come: int) -> StoreLimits:
    """What the store may hold for all shards together; where no bytes are given, a share of what is free on the device
    that holds them, once the largest shards that may be loaded together are."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    else:
        memory = psutil.virtual_memory()
        free, total = memory.available, memory.total
    if limits.cache_bytes is not None and limits.cache_bytes > total:
        raise InvalidInputError(
            f"--cache-bytes {limits.cache_bytes} is more than the {total} bytes of {device.type} memory; "
            f"{free} are free now"
        )
    budget = int(SESSION_SHARE * max(0, free - weights_to_come)) if limits.cache_bytes is None else limits.cache_bytes
    return StoreLimits(
        budget_bytes=budget,
        max_sessions=limits.max_sessions,
        ttl_s=limits.session_ttl_s,
        max_prefixes=MAX_PREFIXES if limits.prefix_reuse and budget else 0,
    )
