"""The mesh as the gateway sees it: which models are whole, which route to take, how the nodes are.

Asks the tracker, and goes on from its last snapshot while no tracker answers, or one that has not heard of all nodes
yet. Knows no sessions and no text.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import aiohttp

from meshnet_core.clock import Clock
from meshnet_core.coverage import ModelSummary, listed, served_models
from meshnet_core.demand import Demand
from meshnet_core.errors import LayersUnavailableError, MeshnetError, ModelNotFoundError, TrackerUnreachableError
from meshnet_core.exploration import RouteDraws
from meshnet_core.frames import PROTOCOLS
from meshnet_core.hop_price import NS
from meshnet_core.membership import NodeInfo, Snapshot
from meshnet_core.planning import choose, plan_route
from meshnet_core.route import Route
from meshnet_core.tracker_client import TrackerHealth

logger = logging.getLogger(__name__)

SNAPSHOT_AGE_S = 1.0  # a snapshot younger than this is not asked for again
NODE_TIMEOUT_S = 2.0


class Tracker(Protocol):
    """What is asked of a tracker."""

    @property
    def url(self) -> str: ...

    async def snapshot(self) -> Snapshot: ...

    async def route(
        self,
        model: str,
        excluded: frozenset[str] = frozenset(),
        *,
        fingerprint: str | None = None,
        demand: Demand | None = None,
    ) -> Route: ...

    async def health(self) -> list[TrackerHealth]: ...


class Mesh:
    """One mesh, through its tracker or trackers.

    Args:
        tracker: what is asked.
        clock: tells a snapshot's age.
        protocols: versions of the wire protocol that this gateway speaks with nodes; ``tracker`` has the same.
        tls: what to show to nodes and to accept of them; None for plain HTTP.
    """

    def __init__(
        self, tracker: Tracker, clock: Clock, *, protocols: range = PROTOCOLS, tls: ssl.SSLContext | None = None
    ) -> None:
        self._tracker = tracker
        self._clock = clock
        self._protocols = protocols
        self._snapshot: Snapshot | None = None
        self._before: Snapshot | None = None  # what was known before a tracker that started lately
        self._taken_at = 0.0
        self._tracker_answers = True
        self._asking: asyncio.Task[None] | None = None
        self._draws = RouteDraws()
        self._tls = tls
        self._http: aiohttp.ClientSession | None = None

    async def snapshot(self) -> Snapshot:
        """The newest there is; while no tracker answers the last one known, at once.

        Raises:
            TrackerUnreachableError: no tracker answers and none ever did.
        """
        if self._snapshot is None:
            return await self._refresh()
        if not self._tracker_answers:
            self._ask_again()
        elif self._clock.now() - self._taken_at >= SNAPSHOT_AGE_S:
            with suppress(TrackerUnreachableError):
                return await self._refresh()
        return self._snapshot

    async def models(self) -> list[ModelSummary]:
        """Every model that some node serves, whole or not."""
        return served_models(await self.snapshot(), protocols=self._protocols)

    async def model(self, name: str) -> ModelSummary:
        """The model of that name; of several fingerprints one that is whole.

        Raises:
            ModelNotFoundError: no node serves it; names what is served.
        """
        models = await self.models()
        named = [model for model in models if model.name == name]
        if not named:
            there_is = f"there is {listed(sorted({model.name for model in models}))}" if models else "there is none yet"
            raise ModelNotFoundError(f"no node serves a model {name!r}; {there_is}")
        return next((model for model in named if model.complete), named[0])

    async def route(self, model: ModelSummary, excluded: frozenset[str], demand: Demand | None = None) -> Route:
        """A route for one generation that asks so much, from the tracker or, while none answers, planned here.

        Raises:
            LayersUnavailableError: some layers are served by no usable node.
        """
        if self._tracker_answers:
            try:
                return await self._tracker.route(model.name, excluded, fingerprint=model.fingerprint, demand=demand)
            except TrackerUnreachableError:
                self._heard(False)
            except (ModelNotFoundError, LayersUnavailableError):
                with suppress(TrackerUnreachableError):
                    await self._refresh()
                if self._before is None:
                    raise
        return plan_route(
            await self.snapshot(),
            model.name,
            excluded,
            fingerprint=model.fingerprint,
            protocols=self._protocols,
            demand=demand,
            draw=self._draws.next(model.name, explore=demand is None or demand.explore),
        )

    async def nodes_of(self, model: ModelSummary) -> list[NodeInfo]:
        """The nodes that hold some of the model."""
        snapshot = await self.snapshot()
        return [
            node
            for node in snapshot.nodes
            if any(shard.fingerprint == model.fingerprint and shard.model == model.name for shard in node.shards)
        ]

    async def status(self) -> dict[str, Any]:
        """JSON-ready: the tracker, the models with their gaps, and each node as it says itself right now."""
        snapshot = await self.snapshot()
        age_s = self._clock.now() - self._taken_at
        nodes, trackers = await asyncio.gather(
            asyncio.gather(*(self._node_status(node) for node in snapshot.nodes)), self._tracker.health()
        )
        return {
            "tracker": {"url": self._tracker.url, "answers": self._tracker_answers},
            "trackers": [tracker.to_wire() for tracker in trackers],
            "snapshot_age_s": round(age_s, 3),
            "degraded": degradations(trackers, age_s),
            "models": [
                self._model_status(model, snapshot) for model in served_models(snapshot, protocols=self._protocols)
            ],
            "nodes": nodes,
        }

    async def close(self) -> None:
        """Close the connections; idempotent."""
        if self._asking is not None:
            self._asking.cancel()
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _refresh(self) -> Snapshot:
        now = self._clock.now()
        try:
            snapshot = await self._tracker.snapshot()
        except TrackerUnreachableError:
            self._heard(False)
            raise
        self._snapshot, self._taken_at = self._with_those_before(snapshot), now
        self._heard(True)
        return self._snapshot

    def _with_those_before(self, snapshot: Snapshot) -> Snapshot:
        """With the nodes that a tracker which started lately has not heard of yet, as they were known before: they
        serve on, and announce themselves to it within its first lease."""
        if snapshot.settled:
            self._before = None
        elif self._snapshot is not None and (self._snapshot.settled or not self._tracker_answers):
            self._before = self._snapshot
        if self._before is None:
            return snapshot
        heard = {node.node_id for node in snapshot.nodes}
        self._before = Snapshot(tuple(node for node in self._before.nodes if node.node_id not in heard))
        return snapshot.and_those_of(self._before)

    def _ask_again(self) -> None:
        """Whether the tracker is back, asked beside the calls: none waits for one that hangs."""

        async def ask() -> None:
            with suppress(MeshnetError):
                await self._refresh()

        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(ask())

    def _model_status(self, model: ModelSummary, snapshot: Snapshot) -> dict[str, Any]:
        """What is said of a model, with the route that costs least now and what one token on it is expected to take."""
        route = ms = None
        if model.complete:
            plan = choose(
                snapshot,
                model.name,
                frozenset(),
                fingerprint=model.fingerprint,
                protocols=self._protocols,
                demand=Demand(),
                draw=None,
            )
            route, ms = str(plan.route), round(plan.cost / NS, 3)
        return {
            "name": model.name,
            "fingerprint": model.fingerprint,
            "num_layers": model.num_layers,
            "complete": model.complete,
            "missing_layers": [str(gap) for gap in model.missing],
            "route": route,
            "expected_ms_per_token": ms,
        }

    async def _node_status(self, node: NodeInfo) -> dict[str, Any]:
        known: dict[str, Any] = {
            "node": node.node_id,
            "url": node.url,
            "device": node.device,
            "version": node.version,
            "layers": [
                {
                    "model": shard.model,
                    "fingerprint": shard.fingerprint,
                    "layers": str(shard.layers),
                    "dtype": shard.dtype,
                    "loaded": shard.loaded,
                    "decode_ms": shard.decode_ms,
                }
                for shard in node.shards
            ],
            "draining": node.draining,
        }
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=self._tls or True),
                timeout=aiohttp.ClientTimeout(total=NODE_TIMEOUT_S),
            )
        try:
            async with self._http.get(f"{node.url}/healthz") as response:
                told = await response.json()
            # A node with plain steps says nothing of them.
            return {**known, "answers": True, "compile": {}, **{key: told[key] for key in _TOLD if key in told}}
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, TypeError):
            # Listed by the tracker until its lease ends, but gone or hung; what it last said is still worth showing.
            return {**known, "answers": False, "sessions": node.sessions, "state_bytes": node.state_bytes}

    def _heard(self, answers: bool) -> None:
        if answers != self._tracker_answers:
            logger.warning("the tracker at %s %s", self._tracker.url, "answers again" if answers else "does not answer")
        self._tracker_answers = answers


def degradations(trackers: Sequence[TrackerHealth], snapshot_age_s: float) -> list[str]:
    """What of the directory does not work, in words; nothing where all does."""
    silent = [tracker.url for tracker in trackers if not tracker.answers]
    alone = [tracker.url for tracker in trackers if tracker.registry == "unreachable"]
    said = []
    if silent and len(silent) == len(trackers):
        said.append(
            f"no tracker answers ({listed(silent)}): routes are planned from what was known {snapshot_age_s:.0f} s ago"
        )
    elif silent:
        said.append(f"trackers that do not answer: {listed(silent)}")
    if alone:
        said.append(f"trackers that do not reach their registry, and go on by themselves: {listed(alone)}")
    return said


_TOLD = (
    *("boot", "queued", "sessions", "state_bytes", "budget_bytes", "dropped", "misses", "running", "recent"),
    "compile",
)
