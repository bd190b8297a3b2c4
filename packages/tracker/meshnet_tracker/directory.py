"""Who serves what at this moment: nodes under leases that they renew by announcing themselves again.

Soft state: every announcement is the whole of a node, so a directory that lost everything is whole again after one
heartbeat of each. Knows no HTTP, no registry, and no time but its clock's.

Announcements come from the nodes themselves, or from another tracker of the mesh that heard them (`sightings`). Both
enter by the same rule, so that it does not matter where, how often or in which order they come.

Two starts under one node id: the later one replaces the earlier at once (a node that crashed must not wait for its own
lease), and the earlier is refused from then on. So two processes that were given one id by mistake do not take turns;
the one that began first is told.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
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
from meshnet_tracker.events import DirectoryEvent, DrainChanged, Expired, Joined, Left, Restarted
from meshnet_tracker.goodbyes import Goodbyes
from meshnet_tracker.leases import Lease, Leases
from meshnet_tracker.sightings import Goodbye, Heard, Told, start_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshnet_core.clock import Clock
    from meshnet_core.membership import NodeInfo
    from meshnet_core.route import Route

LEASE_S = 15.0
MAX_NODES = 10_000
NEIGHBOURS = 4  # told to a node that asks whose links to measure
_ON_ITS_WAY_S = 0.1  # what an entry may be older than another tracker can tell
GOODBYE_LEASES = 4  # for so long a goodbye is remembered: an announcement that was under way when it came is older


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
        self.goodbye_s = lease_s * GOODBYE_LEASES
        self._clock = clock
        self._began = clock.now()
        self._max_nodes = max_nodes
        self._draws = draws or RouteDraws()
        self._listeners = [on_event] if on_event is not None else []
        self._relays: list[Callable[[Told], None]] = []
        self._leases = Leases(clock, lease_s)
        self._goodbyes = Goodbyes(clock, max_nodes)

    def subscribe(self, listener: Callable[[DirectoryEvent], None]) -> None:
        """Have ``listener`` told of every change from now on, beside ``on_event``."""
        self._listeners.append(listener)

    def relay_to(self, relay: Callable[[Told], None]) -> None:
        """Have ``relay`` told what nodes tell this tracker itself, from within the call that tells it."""
        self._relays.append(relay)

    # -- what nodes tell ------------------------------------------------------------------------------------------

    def announce(self, node: NodeInfo, owner: str | None = None) -> float:
        """Enter a node or renew its lease; what it tells replaces all that it told before.

        An announcement that is not newer than the last one (late, or there twice) changes nothing.

        Args:
            node: as it is now.
            owner: id of the machine that says so (`certificates.owner_of`); None in a mesh without certificates.

        Returns:
            The lease, in seconds.

        Raises:
            InvalidInputError: this start of the node was replaced by a later one under the same id, or is over.
            DirectoryFullError: a new node, and there is no place for it.
            ForbiddenError: the id is leased by another machine.
        """
        self.expire()
        if self._goodbyes.cover(node, owner):
            raise InvalidInputError(
                f"this start of node {node.node_id} ({node.boot}) has said goodbye; a node that comes back starts anew"
            )
        lease = self._leases.get(node.node_id)
        if lease is not None:
            _check_owner(lease, owner)
        if lease is not None and start_of(node) < start_of(lease.node):
            raise InvalidInputError(
                f"another process has registered as node {node.node_id}, at {lease.node.url}; "
                "stop one of the two, or give it an id of its own"
            )
        if lease is not None and node.boot == lease.node.boot and 0 < node.beat <= lease.node.beat:
            return self.lease_s
        self._enter(node, owner, self._clock.now(), relayed=False)
        for relay in self._relays:
            relay(Heard(node, self.lease_s, owner))
        return self.lease_s

    def leave(self, node_id: str, boot: str | None = None, owner: str | None = None) -> None:
        """Take a node out; with ``boot`` that start of it for good, so that a late goodbye cannot remove its successor.
        Without, it may come back by its next announcement.

        Raises:
            UnknownNodeError: no such node, or another start of it, holds the place.
            ForbiddenError: the id is leased by another machine than ``owner``.
        """
        self.expire()
        lease = self._leases.get(node_id)
        if lease is not None:
            _check_owner(lease, owner)
        if boot is not None:
            self._say_goodbye(Goodbye(node_id, boot, owner=owner))
        if lease is None or boot not in (None, lease.node.boot):
            start = f" with boot id {boot}" if lease is not None else ""
            raise UnknownNodeError(f"no node {node_id}{start} is registered here, so none can leave")
        if boot is None:
            self._take_out(lease)
            self._say_goodbye(Goodbye(node_id, lease.node.boot, lease.node.beat, owner))

    def goodbyes(self) -> list[tuple[Goodbye, float]]:
        """What is remembered of starts that are over, and for how many more seconds."""
        return self._goodbyes.left()

    # -- what other trackers tell ---------------------------------------------------------------------------------

    def hear(self, heard: Heard) -> None:
        """Enter what another tracker heard of a node, unless something newer is known here.

        Raises:
            DirectoryFullError: a new node, and there is no place for it.
        """
        self.expire()
        node, owner = heard.node, heard.owner
        heard_at = self._clock.now() + heard.left_s - self.lease_s
        if heard.left_s <= 0 or self._goodbyes.cover(node, owner):
            return
        lease = self._leases.get(node.node_id)
        if lease is not None and lease.owner != owner:
            return  # whoever was first here keeps the place until its lease is over
        if lease is not None and node.boot == lease.node.boot:
            if node.beat < lease.node.beat or (node.beat == lease.node.beat and heard_at <= lease.heard_at):
                return
            if node.beat == lease.node.beat != 0:
                # It lasts longer because of what another tracker says, though the node spoke to this one as well.
                lease.relayed = lease.relayed or heard_at - lease.heard_at > _ON_ITS_WAY_S
                lease.heard_at = heard_at
                return
        elif lease is not None and start_of(node) < start_of(lease.node):
            return
        self._enter(node, owner, heard_at, relayed=True)

    def hear_goodbye(self, goodbye: Goodbye, left_s: float) -> None:
        """Enter a goodbye that another tracker remembers for ``left_s`` more seconds."""
        self.expire()
        self._remember(goodbye, self._clock.now() + left_s)

    def hold(self) -> None:
        """From now on nothing is heard from other trackers: nodes that only they heard of keep their place meanwhile,
        for a while at most, since their silence says nothing."""
        self.expire()
        self._leases.hold()

    def release(self) -> None:
        """Other trackers are heard again: the nodes held have one more lease to be heard of."""
        self.expire()
        self._leases.release()

    # -- what is known --------------------------------------------------------------------------------------------

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
        self._goodbyes.expire()
        for lease in self._leases.over():
            self._tell(Expired(lease.node, now - lease.heard_at))

    def heard(self) -> list[Heard]:
        """Every node, with what is left of its lease, by what this tracker knows of it."""
        self.expire()
        now = self._clock.now()
        return [Heard(lease.node, lease.heard_at + self.lease_s - now, lease.owner) for lease in self._leases]

    def counts(self) -> tuple[int, int]:
        """How many nodes were heard of last by themselves, and how many through other trackers."""
        self.expire()
        relayed = sum(lease.relayed for lease in self._leases)
        return len(self._leases) - relayed, relayed

    def snapshot(self) -> Snapshot:
        """The live nodes as they announced themselves, in the order of their ids."""
        self.expire()
        nodes = tuple(sorted((lease.node for lease in self._leases), key=lambda node: node.node_id))
        return Snapshot(nodes, settled=self._clock.now() - self._began >= self.lease_s)

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
        others = chain(islice(self._leases, first, None), islice(self._leases, first))
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
        """A route through the live nodes, as `planning.plan_route` tells, its errors too; one in twenty explores."""
        route = self.planning(model, excluded, fingerprint, protocols, demand)()
        self.took(route)
        return route

    def planning(
        self,
        model: str,
        excluded: frozenset[str] = frozenset(),
        fingerprint: str | None = None,
        protocols: range = PROTOCOLS,
        demand: Demand | None = None,
    ) -> Callable[[], Route]:
        """What plans that route, over the nodes as they are now: pure, and long where there are many nodes; any thread
        may call it while this directory changes. A route that is given out is then told to `took`.
        """
        snapshot = self.snapshot()
        loaded = tuple(
            replace(node, sessions=node.sessions + routed) if (routed := self._leases[node.node_id].routed) else node
            for node in snapshot.nodes
        )
        demand = demand or Demand()
        return partial(
            plan_route,
            Snapshot(loaded),
            model,
            excluded,
            fingerprint=fingerprint,
            protocols=protocols,
            demand=demand,
            draw=self._draws.next(model, explore=demand.explore),
        )

    def took(self, route: Route) -> None:
        """A route was given out: until its nodes' next heartbeats it counts as sessions there, so that many generations
        that start between two heartbeats do not all take the same one of several equal covers.
        """
        for hop in route.hops:
            if (lease := self._leases.get(hop.node_id)) is not None:
                lease.routed += 1

    # -- bookkeeping ----------------------------------------------------------------------------------------------

    def _enter(self, node: NodeInfo, owner: str | None, heard_at: float, *, relayed: bool) -> None:
        """What is told is the newest of its node: make it what is known."""
        lease = self._leases.get(node.node_id)
        if lease is None:
            if len(self._leases) >= self._max_nodes:
                raise DirectoryFullError(
                    f"this tracker holds {self._max_nodes} nodes, as many as it may; stop one, or start another tracker"
                )
            self._leases.begin(Lease(node, heard_at, owner, relayed))
            self._tell(Joined(node))
            return
        before = lease.node
        if node.boot == before.boot:
            heard_at = max(heard_at, lease.heard_at)  # a later announcement, whatever two clocks made of its age
        lease.node, lease.heard_at, lease.relayed, lease.routed = node, heard_at, relayed, 0
        self._leases.renewed(lease)
        if node.boot != before.boot:
            self._tell(Restarted(node, before))
        if node.draining != before.draining:
            self._tell(DrainChanged(node))

    def _say_goodbye(self, goodbye: Goodbye) -> None:
        self._remember(goodbye, self._clock.now() + self.goodbye_s)
        for relay in self._relays:
            relay(goodbye)

    def _remember(self, goodbye: Goodbye, until: float) -> None:
        goodbye = self._goodbyes.remember(goodbye, until)
        lease = self._leases.get(goodbye.node_id)
        if lease is not None and goodbye.covers(lease.node, lease.owner):
            self._take_out(lease)

    def _take_out(self, lease: Lease) -> None:
        self._leases.end(lease)
        self._tell(Left(lease.node))

    def _tell(self, event: DirectoryEvent) -> None:
        for listener in self._listeners:
            listener(event)


def _check_owner(lease: Lease, owner: str | None) -> None:
    if lease.owner != owner:
        raise ForbiddenError(
            f"node {lease.node.node_id} was registered by another machine, at {lease.node.url}; "
            "give this one another --name, or stop that one and wait for the end of its lease"
        )
