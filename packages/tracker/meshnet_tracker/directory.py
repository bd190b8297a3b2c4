"""Who serves what at this moment: nodes under leases that they renew by announcing themselves again.

Soft state: every announcement is the whole of a node, so a directory that lost everything is whole again after one
heartbeat of each. Knows no HTTP, and no time but its clock's.

Two starts under one node id: the newer one replaces the older at once (a node that crashed must not wait for its own
lease), and the older is refused from then on. So two processes that were given one id by mistake do not take turns; the
one that came first is told.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import TYPE_CHECKING

from meshnet_core.coverage import may_follow
from meshnet_core.demand import Demand
from meshnet_core.errors import DirectoryFullError, ForbiddenError, InvalidInputError, UnknownNodeError
from meshnet_core.exploration import RouteDraws
from meshnet_core.frames import PROTOCOLS
from meshnet_core.link_info import Neighbour
from meshnet_core.membership import Snapshot
from meshnet_core.planning import plan_route

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshnet_core.clock import Clock
    from meshnet_core.membership import NodeInfo
    from meshnet_core.route import Route

LEASE_S = 15.0
MAX_NODES = 10_000
NEIGHBOURS = 4  # told to a node that asks whose links to measure
_REPLACED_KEPT = 8  # earlier starts that are remembered for each node


@dataclass(frozen=True, slots=True)
class Joined:
    """A node that the directory did not know."""

    node: NodeInfo

    def __str__(self) -> str:
        held = ", ".join(f"{shard.model} {shard.layers} {shard.dtype}" for shard in self.node.shards) or "nothing yet"
        return f"node {self.node.node_id} joined from {self.node.url}, serving {held}"


@dataclass(frozen=True, slots=True)
class Restarted:
    """A node that came back under another boot id while its lease was still running."""

    node: NodeInfo
    before: NodeInfo

    def __str__(self) -> str:
        moved = "" if self.node.url == self.before.url else f", now at {self.node.url} instead of {self.before.url}"
        return f"node {self.node.node_id} restarted ({self.before.boot} -> {self.node.boot}){moved}"


@dataclass(frozen=True, slots=True)
class DrainChanged:
    """A node that began to turn new sessions away, or takes them again."""

    node: NodeInfo

    def __str__(self) -> str:
        return f"node {self.node.node_id} {'is draining' if self.node.draining else 'takes sessions again'}"


@dataclass(frozen=True, slots=True)
class Left:
    """A node that said goodbye."""

    node: NodeInfo

    def __str__(self) -> str:
        return f"node {self.node.node_id} left"


@dataclass(frozen=True, slots=True)
class Expired:
    """A node that has not been heard of for a whole lease."""

    node: NodeInfo
    silent_s: float

    def __str__(self) -> str:
        return f"node {self.node.node_id} was not heard of for {self.silent_s:.1f} s: its lease has expired"


DirectoryEvent = Joined | Restarted | DrainChanged | Left | Expired


@dataclass(slots=True)
class _Lease:
    node: NodeInfo
    heard_at: float
    owner: str | None = None  # of the certificate that leased it, where there are certificates
    routed: int = 0  # routes through the node since then, which its own count of sessions cannot show yet
    replaced: deque[str] = field(default_factory=lambda: deque(maxlen=_REPLACED_KEPT))  # boot ids


class Directory:
    """The nodes with a running lease.

    Args:
        clock: tells the time; a lease is over ``lease_s`` after the last announcement, at that very moment.
        lease_s: seconds.
        max_nodes: how many nodes it holds at most.
        on_event: told of every change, in order, from within the call that made or noticed it.
        draws: choose among equal routes, and when to explore.
    """

    def __init__(
        self,
        clock: Clock,
        lease_s: float = LEASE_S,
        *,
        max_nodes: int = MAX_NODES,
        on_event: Callable[[DirectoryEvent], None] | None = None,
        draws: RouteDraws | None = None,
    ) -> None:
        if not 0 < lease_s < float("inf") or max_nodes < 1:
            raise InvalidInputError(f"a lease must be above 0 s and nodes at least 1, not {lease_s!r} and {max_nodes}")
        self.lease_s = lease_s
        self._clock = clock
        self._max_nodes = max_nodes
        self._draws = draws or RouteDraws()
        self._listeners = [on_event] if on_event is not None else []
        self._leases: OrderedDict[str, _Lease] = OrderedDict()  # the one heard of longest ago comes first

    def subscribe(self, listener: Callable[[DirectoryEvent], None]) -> None:
        """Have ``listener`` told of every change from now on, beside ``on_event``."""
        self._listeners.append(listener)

    def announce(self, node: NodeInfo, owner: str | None = None) -> float:
        """Enter a node or renew its lease; what it tells replaces all that it told before.

        Args:
            node: as it is now.
            owner: id of the machine that says so (`certificates.owner_of`); None in a mesh without certificates.

        Returns:
            The lease, in seconds.

        Raises:
            InvalidInputError: this start of the node was replaced by another one under the same id.
            DirectoryFullError: a new node, and there is no place for it.
            ForbiddenError: the id is leased by another machine.
        """
        self.expire()
        now = self._clock.now()
        lease = self._leases.get(node.node_id)
        if lease is None:
            if len(self._leases) >= self._max_nodes:
                raise DirectoryFullError(
                    f"this tracker holds {self._max_nodes} nodes, as many as it may; stop one, or start another tracker"
                )
            self._leases[node.node_id] = _Lease(node, now, owner)
            self._tell(Joined(node))
            return self.lease_s
        _check_owner(lease, owner)
        before = lease.node
        if node.boot in lease.replaced:
            raise InvalidInputError(
                f"another process has registered as node {node.node_id}, at {before.url}; "
                "stop one of the two, or give it an id of its own"
            )
        lease.node, lease.heard_at, lease.routed = node, now, 0
        self._leases.move_to_end(node.node_id)
        if node.boot != before.boot:
            lease.replaced.append(before.boot)
            self._tell(Restarted(node, before))
        if node.draining != before.draining:
            self._tell(DrainChanged(node))
        return self.lease_s

    def leave(self, node_id: str, boot: str | None = None, owner: str | None = None) -> None:
        """Take a node out; with ``boot`` only that start of it, so that a late goodbye cannot remove its successor.

        Raises:
            UnknownNodeError: no such node, or another start of it, holds the place.
            ForbiddenError: the id is leased by another machine than ``owner``.
        """
        self.expire()
        lease = self._leases.get(node_id)
        if lease is None or boot not in (None, lease.node.boot):
            start = f" with boot id {boot}" if lease is not None else ""
            raise UnknownNodeError(f"no node {node_id}{start} is registered here, so none can leave")
        _check_owner(lease, owner)
        del self._leases[node_id]
        self._tell(Left(lease.node))

    def require(self, node_id: str, boot: str | None = None, owner: str | None = None) -> NodeInfo:
        """A node as it announced itself; with ``boot`` only that start of it.

        Raises:
            UnknownNodeError: no such node, or another start of it, is registered.
            ForbiddenError: the id is leased by another machine than ``owner``.
        """
        self.expire()
        lease = self._leases.get(node_id)
        if lease is None or boot not in (None, lease.node.boot):
            raise UnknownNodeError(f"node {node_id} is not registered here, or not this start of it")
        _check_owner(lease, owner)
        return lease.node

    def expire(self) -> None:
        """Drop the nodes whose lease is over; every other method does so first."""
        now = self._clock.now()
        while self._leases:
            lease = next(iter(self._leases.values()))
            if now - lease.heard_at < self.lease_s:
                return
            self._leases.popitem(last=False)
            self._tell(Expired(lease.node, now - lease.heard_at))

    def snapshot(self) -> Snapshot:
        """The live nodes as they announced themselves, in the order of their ids."""
        self.expire()
        return Snapshot(tuple(self._leases[node_id].node for node_id in sorted(self._leases)))

    def neighbours(self, node_id: str, at: float) -> list[Neighbour]:
        """Some nodes that may come right after a node on a route, at most `NEIGHBOURS` of them.

        Args:
            node_id: whose; none where it is not registered.
            at: in [0, 1): from where on the others are looked through, so that who asks again is told of others.
        """
        self.expire()
        lease = self._leases.get(node_id)
        if lease is None:
            return []
        first = int(at * len(self._leases))
        others = chain(islice(self._leases.values(), first, None), islice(self._leases.values(), first))
        fit = (
            Neighbour(other.node.node_id, other.node.url)
            for other in others
            if other is not lease and not other.node.draining and may_follow(lease.node, other.node)
        )
        return list(islice(fit, NEIGHBOURS))

    def plan(
        self,
        model: str,
        excluded: frozenset[str] = frozenset(),
        fingerprint: str | None = None,
        protocols: range = PROTOCOLS,
        demand: Demand | None = None,
    ) -> Route:
        """A route through the live nodes, as `planning.plan_route` tells, its errors included; one in twenty explores.

        Routes given out since a node's last heartbeat count as sessions there, so that many generations that start
        between two heartbeats do not all take the same one of several equal covers.
        """
        snapshot = self.snapshot()
        loaded = tuple(
            replace(node, sessions=node.sessions + routed) if (routed := self._leases[node.node_id].routed) else node
            for node in snapshot.nodes
        )
        demand = demand or Demand()
        route = plan_route(
            Snapshot(loaded),
            model,
            excluded,
            fingerprint=fingerprint,
            protocols=protocols,
            demand=demand,
            draw=self._draws.next(model, explore=demand.explore),
        )
        for node_id, hops in Counter(hop.node_id for hop in route.hops).items():
            self._leases[node_id].routed += hops
        return route

    def _tell(self, event: DirectoryEvent) -> None:
        for listener in self._listeners:
            listener(event)


def _check_owner(lease: _Lease, owner: str | None) -> None:
    if lease.owner != owner:
        raise ForbiddenError(
            f"node {lease.node.node_id} was registered by another machine, at {lease.node.url}; "
            "give this one another --name, or stop that one and wait for the end of its lease"
        )
