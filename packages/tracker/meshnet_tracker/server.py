"""The tracker's HTTP API over a `Directory`, shared or not: an aiohttp application that docs/tracker-api.md describes.

Answers requests that `tracker_door` let in and `tracker_requests` read. Knows no lease and chooses no route.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from aiohttp import web
from prometheus_client import generate_latest

from meshnet_core import __version__
from meshnet_core.clock import SystemClock
from meshnet_core.doorkeeper import Doorkeeper
from meshnet_core.errors import (
    InvalidInputError,
    TicketRefusedError,
)
from meshnet_core.ids import check_id, mint_tracker_id
from meshnet_core.membership import NodeInfo
from meshnet_core.secure_site import owner_of_request
from meshnet_core.wire_fields import MAX_WHOLE, text
from meshnet_tracker.directory import Directory
from meshnet_tracker.events import EventLog
from meshnet_tracker.placement_desk import PlacementDesk
from meshnet_tracker.route_desk import RouteDesk
from meshnet_tracker.tracker_door import known_alone, refusals_as_json
from meshnet_tracker.tracker_metrics import TrackerMetrics
from meshnet_tracker.tracker_requests import json_of, number, query, route_request
from meshnet_tracker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from meshnet_tracker.enrollment import Enrollment
    from meshnet_tracker.sharing import Sharing

MAX_BODY = 512 * 1024  # bytes: an announcement of as many shards as a node may have
MAX_WAIT_S = 60  # for an event
# Requests of one peer. A node makes one each few seconds, a gateway two for each answer; all of one machine, or behind
# one address where there are no certificates, count together.
RATE_PER_S, RATE_BURST = 500.0, 2000.0

ENROLL_PATH = "/v1/enroll"  # the one path that needs no certificate: it is how to get one

logger = logging.getLogger(__name__)


def new_doorkeeper() -> Doorkeeper:
    """A tracker's, with its limits."""
    return Doorkeeper(SystemClock(), per_s=RATE_PER_S, burst=RATE_BURST)


def create_app(
    directory: Directory,
    doorkeeper: Doorkeeper | None = None,
    enrollment: Enrollment | None = None,
    desk: PlacementDesk | None = None,
    *,
    sharing: Sharing | None = None,
) -> web.Application:
    """The application; it logs the directory's events, sweeps out dead nodes and shares the directory while it runs.

    Args:
        directory: of the nodes.
        doorkeeper: limits each peer, and counts who is turned away; a new one if not given.
        enrollment: lets machines into the mesh; None in one without certificates.
        desk: chooses layers for the nodes that ask for some; a new one if not given.
        sharing: with other trackers; None where this one keeps its directory alone.
    """
    doorkeeper = doorkeeper or new_doorkeeper()
    metrics = TrackerMetrics(directory, doorkeeper, sharing)
    log = EventLog(time.time)
    directory.subscribe(lambda event: logger.info("%s", event))
    directory.subscribe(log.add)
    door = [refusals_as_json(metrics, MAX_BODY), known_alone(doorkeeper, ENROLL_PATH)]
    app = web.Application(middlewares=door, client_max_size=MAX_BODY)
    app.cleanup_ctx.append(_sweeper(directory))
    app.cleanup_ctx.append(_sharer(sharing))
    planner, placer, encoder = (_worker_of(app, name) for name in ("routes", "placement", "snapshots"))
    routes = RouteDesk(directory, planner)

    async def announce(request: web.Request) -> web.Response:
        query(request)
        node_id = check_id(request.match_info["node_id"], "node id")
        node = NodeInfo.from_wire(await json_of(request))
        if node.node_id != node_id:
            raise InvalidInputError(f"the path names node {node_id}, but its announcement node {node.node_id}")
        if request.secure and not node.url.startswith("https://"):
            raise InvalidInputError(f"node {node_id} is at {node.url}; nodes of this mesh are at https:// addresses")
        lease_s = directory.announce(node, owner_of_request(request))
        return web.json_response({"lease_s": lease_s, **_trackers(sharing)})

    async def leave(request: web.Request) -> web.Response:
        boot = query(request, "boot").get("boot")
        directory.leave(check_id(request.match_info["node_id"], "node id"), boot, owner_of_request(request))
        return web.json_response({})

    async def snapshot(request: web.Request) -> web.Response:
        query(request)
        known, told = directory.snapshot(), _trackers(sharing)
        body = await encoder.run(lambda: json.dumps({**known.to_wire(), **told}))
        return web.json_response(text=body)

    async def neighbours(request: web.Request) -> web.Response:
        query(request)
        node_id = check_id(request.match_info["node_id"], "node id")
        found = directory.neighbours(node_id, random.random())  # noqa: S311 - guards nothing
        return web.json_response({"neighbours": [asdict(neighbour) for neighbour in found]})

    async def route(request: web.Request) -> web.Response:
        query(request)
        planned = await routes.plan(route_request(await json_of(request)))
        metrics.routes_planned.inc()
        return web.json_response(planned.to_wire())

    app.add_routes(
        [
            web.put("/v1/nodes/{node_id}", announce),
            web.delete("/v1/nodes/{node_id}", leave),
            web.get("/v1/snapshot", snapshot),
            web.get("/v1/nodes/{node_id}/neighbours", neighbours),
            web.get("/v1/events", _events(log, mint_tracker_id() if sharing is None else sharing.me.tracker_id)),
            web.post("/v1/route", route),
            *_enrollment_routes(enrollment),
            _placement_route(directory, desk or PlacementDesk(SystemClock(), directory.snapshot), placer),
            *_watch_routes(app, directory, sharing, metrics),
        ]
    )
    return app


def _watch_routes(
    app: web.Application, directory: Directory, sharing: Sharing | None, metrics: TrackerMetrics
) -> list[web.RouteDef]:
    """For what watches this tracker: alive, ready, metrics."""
    stopping: list[bool] = []

    async def healthz(request: web.Request) -> web.Response:
        query(request)
        alone = sharing is not None and not sharing.reachable
        return web.json_response(
            {
                "status": "degraded" if alone else "ok",
                "version": __version__,
                "nodes": len(directory.snapshot().nodes),
                "registry": sharing.status() if sharing is not None else None,
                "trackers": _trackers(sharing)["trackers"],
            }
        )

    async def readyz(request: web.Request) -> web.Response:
        query(request)
        if stopping:
            return web.json_response({"status": "not ready", "reason": "this tracker is stopping"}, status=503)
        return web.json_response({"status": "ready"})

    async def stops(_: web.Application) -> None:
        stopping.append(True)

    async def exposition(request: web.Request) -> web.Response:
        query(request)
        return web.Response(
            body=generate_latest(metrics.registry), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    app.on_shutdown.append(stops)
    return [web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", exposition)]


def _placement_route(directory: Directory, desk: PlacementDesk, worker: Worker) -> web.RouteDef:
    """What to hold, for nodes that leave it to the tracker."""

    async def placement(request: web.Request) -> web.Response:
        boot = query(request, "boot").get("boot")
        node_id = check_id(request.match_info["node_id"], "node id")
        node = directory.require(node_id, boot, owner_of_request(request))
        wish = await worker.run(desk.ask, node, directory.snapshot())
        return web.json_response(wish.to_wire())

    return web.get("/v1/placement/{node_id}", placement)


def _enrollment_routes(enrollment: Enrollment | None) -> list[web.RouteDef]:
    """How machines get into the mesh; in one without certificates, where that is told."""

    def there() -> Enrollment:
        if enrollment is None:
            raise TicketRefusedError("this tracker is in no mesh with certificates; nothing here is joined by ticket")
        return enrollment

    async def authority(request: web.Request) -> web.Response:
        query(request)
        return web.json_response(there().describe())

    async def enroll(request: web.Request) -> web.Response:
        query(request)
        document = await json_of(request)
        token = text(document, "token") if document.get("token") is not None else None
        asked = document.get("request")
        if not isinstance(asked, str) or not asked.isascii():
            raise InvalidInputError("request must be a certificate request in PEM")
        certificate = there().certify(asked, token, owner_of_request(request))
        return web.json_response({"certificate": certificate.decode()})

    return [web.get(ENROLL_PATH, authority), web.post(ENROLL_PATH, enroll)]


def _events(log: EventLog, log_id: str) -> Any:
    """Answers with the events after a number, and waits for one if asked to."""

    async def events(request: web.Request) -> web.Response:
        asked = query(request, "since", "log", "wait_s")
        seq, wait_s = number(asked, "since", MAX_WHOLE), number(asked, "wait_s", MAX_WAIT_S)
        if asked.get("log", log_id) != log_id:
            seq = 0  # numbers of another tracker, or of one that has restarted, say nothing here
        await log.wait(seq, wait_s)
        found = [logged.to_wire() for logged in log.since(seq)]
        missed = found[0]["seq"] - 1 - seq if found else 0
        return web.json_response({"log": log_id, "last": log.last, "missed": missed, "events": found})

    return events


def _sweeper(directory: Directory) -> Any:
    """Notices dead nodes, and says so in the log, even while nobody asks."""

    async def sweep() -> None:
        while True:
            await asyncio.sleep(directory.lease_s / 3)
            directory.expire()

    async def running(_: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(sweep())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    return running


def _sharer(sharing: Sharing | None) -> Any:
    """Shares the directory, if it is to be shared, and takes leave of the other trackers at the end."""

    async def running(_: web.Application) -> AsyncIterator[None]:
        if sharing is None:
            yield
            return
        task = asyncio.create_task(sharing.run())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await sharing.leave()

    return running


def _worker_of(app: web.Application, name: str) -> Worker:
    """A thread of the application's own, for as long as it runs."""
    worker = Worker(name)

    async def close(_: web.Application) -> None:
        worker.close()

    app.on_cleanup.append(close)
    return worker


def _trackers(sharing: Sharing | None) -> dict[str, Any]:
    """What nodes and gateways are told of the trackers with every answer: where else to ask, and whether what they tell
    this one reaches the others."""
    if sharing is None:
        return {"trackers": [], "registry": "none"}
    return {
        "trackers": [info.url for info in sharing.others()],
        "registry": "reachable" if sharing.reachable else "unreachable",
    }
