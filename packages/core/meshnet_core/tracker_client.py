"""The tracker as nodes and gateways see it: an asynchronous client of its HTTP API.

What each path takes and gives; `tracker_calls` makes the calls. Knows no lease and no retry over time; who keeps a node
registered is `meshnet_node.registration`.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from meshnet_core.demand import Demand
from meshnet_core.errors import InvalidInputError, MeshnetError
from meshnet_core.event_page import EventPage
from meshnet_core.frames import PROTOCOLS
from meshnet_core.link_info import MAX_LINKS, Neighbour
from meshnet_core.membership import NodeInfo, Snapshot
from meshnet_core.placeable import Wish
from meshnet_core.route import Route
from meshnet_core.tracker_calls import TrackerCalls
from meshnet_core.web_address import is_web_address
from meshnet_core.wire_fields import items, optional_number

MAX_LEASE_S = 86_400.0
MAX_TRACKERS = 16  # others that one tracker may name


@dataclass(frozen=True, slots=True)
class MeshOfTrackers:
    """What a tracker says with its answers of the others that share its directory.

    Attributes:
        others: their addresses.
        registry: ``none`` where it keeps its directory alone, ``reachable``, or ``unreachable``: then the others do not
            hear what this one is told.
    """

    others: tuple[str, ...] = ()
    registry: str = "none"


@dataclass(frozen=True, slots=True)
class TrackerHealth:
    """How one tracker is.

    Attributes:
        url: its address.
        answers: whether it does.
        registry: as in `MeshOfTrackers`; None where it does not answer.
        nodes: with a running lease; None where it does not answer.
    """

    url: str
    answers: bool
    registry: str | None = None
    nodes: int | None = None

    def to_wire(self) -> dict[str, Any]:
        return {"url": self.url, "answers": self.answers, "registry": self.registry, "nodes": self.nodes}


class TrackerClient:
    """Talks to one tracker; made outside or inside an event loop, used inside one, closed by :meth:`close`.

    Args:
        url: the tracker's, such as ``http://10.0.0.5:7400``.
        timeout_s: seconds for one call, from dialling to the last byte.
        protocols: versions of the wire protocol that routes may be of: those that the caller speaks with nodes.
        tls: what to show and to accept (`Credentials.client_context`); None for plain HTTP.

    Attributes:
        told: what its last answer to a heartbeat or for a snapshot said of other trackers.

    Raises:
        InvalidInputError: if ``url`` is none, or of a tracker that speaks TLS where this machine has no ``tls`` or the
            other way round.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 5.0,
        protocols: range = PROTOCOLS,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._calls = TrackerCalls(url, timeout_s, tls)
        self._protocols = protocols
        self.told = MeshOfTrackers()

    @property
    def url(self) -> str:
        """The tracker's."""
        return self._calls.url

    async def close(self) -> None:
        """Close the connections; idempotent."""
        await self._calls.close()

    async def heartbeat(self, info: NodeInfo) -> float:
        """Announce a node, for the first time or again.

        Returns:
            Seconds until the tracker forgets it unless it is announced again.

        Raises:
            TrackerUnreachableError: nothing that is a tracker answers in time.
            MeshnetError: what the tracker refused with.
        """
        reply = await self._calls.call("PUT", f"/v1/nodes/{quote(info.node_id, safe='')}", info.to_wire())
        try:
            lease_s = optional_number(reply, "lease_s", most=MAX_LEASE_S)
        except InvalidInputError as error:
            raise self._calls.no_tracker(error.message) from error
        if not lease_s:
            raise self._calls.no_tracker(f"it granted a lease of {lease_s} s")
        self.told = _mesh_of_trackers(reply)
        return lease_s

    async def leave(self, node_id: str, *, boot: str | None = None) -> None:
        """Take a node out of the directory; with ``boot`` only if that start of it is the one registered.

        Raises:
            UnknownNodeError: no such node, or another start of it, is registered.
            TrackerUnreachableError: as :meth:`heartbeat`.
        """
        params = {"boot": boot} if boot else None
        await self._calls.call("DELETE", f"/v1/nodes/{quote(node_id, safe='')}", params=params)

    async def wish(self, node_id: str, *, boot: str) -> Wish:
        """What the tracker wants a node to hold that leaves its layers to it.

        Raises:
            InvalidInputError: nothing of the model fits there, or the mesh serves it with other contents.
            UnknownNodeError: this start of the node is not registered.
            TrackerUnreachableError: as :meth:`heartbeat`.
        """
        reply = await self._calls.call("GET", f"/v1/placement/{quote(node_id, safe='')}", params={"boot": boot})
        try:
            return Wish.from_wire(reply)
        except InvalidInputError as error:
            raise self._calls.no_tracker(error.message) from error

    async def snapshot(self) -> Snapshot:
        """All nodes that the tracker knows now.

        Raises:
            TrackerUnreachableError: as :meth:`heartbeat`.
        """
        reply = await self._calls.call("GET", "/v1/snapshot")
        try:
            snapshot = Snapshot.from_wire(reply)
        except InvalidInputError as error:
            raise self._calls.no_tracker(error.message) from error
        self.told = _mesh_of_trackers(reply)
        return snapshot

    async def health(self) -> list[TrackerHealth]:
        """How the tracker is, in a list of one; one that does not answer is told as such."""
        try:
            reply = await self._calls.call("GET", "/healthz")
        except MeshnetError:
            return [TrackerHealth(self.url, answers=False)]
        registry, nodes = reply.get("registry"), reply.get("nodes")
        reachable = registry.get("reachable") if isinstance(registry, dict) else None
        known = "none" if reachable is None else "reachable" if reachable is True else "unreachable"
        return [TrackerHealth(self.url, True, known, nodes if isinstance(nodes, int) else None)]

    async def neighbours(self, node_id: str) -> list[Neighbour]:
        """Some nodes that may come right after a node on a route, for it to measure its links to them.

        Raises:
            TrackerUnreachableError: as :meth:`heartbeat`.
        """
        reply = await self._calls.call("GET", f"/v1/nodes/{quote(node_id, safe='')}/neighbours")
        try:
            return [Neighbour.from_wire(one) for one in items(reply, "neighbours", most=MAX_LINKS)]
        except InvalidInputError as error:
            raise self._calls.no_tracker(error.message) from error

    async def events(self, since: int = 0, log: str | None = None, *, wait_s: int = 0) -> EventPage:
        """What happened to nodes after event ``since`` of ``log``; if nothing did, it is waited for up to ``wait_s``.

        Raises:
            TrackerUnreachableError: as :meth:`heartbeat`.
        """
        params = {"since": str(since), "wait_s": str(wait_s)} | ({} if log is None else {"log": log})
        reply = await self._calls.call("GET", "/v1/events", params=params, more_s=wait_s)
        try:
            return EventPage.from_wire(reply)
        except InvalidInputError as error:
            raise self._calls.no_tracker(error.message) from error

    async def route(
        self,
        model: str,
        excluded: frozenset[str] = frozenset(),
        *,
        fingerprint: str | None = None,
        demand: Demand | None = None,
    ) -> Route:
        """A route planned by the tracker, as `planning.plan_route` tells.

        Raises:
            ModelNotFoundError: no node serves ``model``.
            LayersUnavailableError: some layers are served by no usable node.
            TrackerUnreachableError: as :meth:`heartbeat`.
        """
        request: dict[str, Any] = {
            "model": model,
            "excluded": sorted(excluded),
            "protocol_min": self._protocols[0],
            "protocol_max": self._protocols[-1],
        }
        if fingerprint is not None:
            request["fingerprint"] = fingerprint
        if demand is not None:
            request["demand"] = demand.to_wire()
        reply = await self._calls.call("POST", "/v1/route", request)
        try:
            return Route.from_wire(reply)
        except InvalidInputError as error:
            raise self._calls.no_tracker(error.message) from error

    async def enroll(self, request_pem: bytes, token: str | None = None) -> bytes:
        """A certificate, PEM, for a request (`certificates.make_request`); without ``token`` a newer one of this
        machine's.

        Raises:
            TicketRefusedError: the token is not good, or this tracker lets nobody in.
            TrackerUnreachableError: as :meth:`heartbeat`.
        """
        asked: dict[str, Any] = {"request": request_pem.decode()}
        if token is not None:
            asked["token"] = token
        return self._pem(await self._calls.call("POST", "/v1/enroll", asked), "certificate")

    async def authority(self) -> bytes:
        """The certificate, PEM, of the mesh's authority, as this tracker tells it: to be compared with a pin.

        Raises:
            TicketRefusedError: this tracker is in no mesh.
            TrackerUnreachableError: as :meth:`heartbeat`.
        """
        return self._pem(await self._calls.call("GET", "/v1/enroll"), "authority")

    def _pem(self, reply: dict[str, Any], key: str) -> bytes:
        told = reply.get(key)
        if not isinstance(told, str) or not told.startswith("-----BEGIN CERTIFICATE-----"):
            raise self._calls.no_tracker(f"it gave no {key}")
        return told.encode()


def _mesh_of_trackers(reply: dict[str, Any]) -> MeshOfTrackers:
    """What a reply says of other trackers; a tracker that says nothing of them, or nonsense, has none."""
    named, registry = reply.get("trackers"), reply.get("registry")
    urls = [url for url in named if isinstance(url, str) and is_web_address(url)] if isinstance(named, list) else []
    known = registry if registry in {"reachable", "unreachable"} else "none"
    return MeshOfTrackers(tuple(url.rstrip("/") for url in urls[:MAX_TRACKERS]), known)
