"""Which nodes serve a generation: the cheapest chain of hops that covers a model's layers exactly once.

Pure: a snapshot in, a route out, so that a gateway can plan from its last snapshot while no tracker answers. Knows no
lease, no clock and no socket, and measures nothing itself. What a hop costs is `hop_price`'s, how the cheapest chain is
found `cheapest_path`'s, who of equals serves `exploration`'s.

A hop runs from its effective start to the END of its shard. So from any boundary below the model's end some shard leads
on exactly when some shard holds the layer there: a route exists exactly when every layer is held by a usable shard, and
what is missing is what the union of the shards leaves out (`coverage`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshnet_core.cheapest_path import Edge, Path, cheapest_path
from meshnet_core.coverage import (
    ModelSummary,
    Offer,
    Variant,
    VariantKey,
    explain_gaps,
    listed,
    served_models,
    variants_of,
)
from meshnet_core.demand import Demand
from meshnet_core.errors import LayersUnavailableError, ModelNotFoundError
from meshnet_core.exploration import explores, lean_of, target_of
from meshnet_core.frames import PROTOCOLS
from meshnet_core.hop_price import price_entry, price_hop, price_link, price_links, shortage_of
from meshnet_core.route import Hop, Route

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshnet_core.membership import Snapshot

__all__ = ["ModelSummary", "Plan", "choose", "plan_route", "served_models"]

_FOR_SURE = 2**62  # nanoseconds, more than any route costs: what the shard that is to be tried is paid to be on it


def plan_route(
    snapshot: Snapshot,
    model: str,
    excluded: frozenset[str] = frozenset(),
    *,
    fingerprint: str | None = None,
    protocols: range = PROTOCOLS,
    demand: Demand | None = None,
    draw: float | None = None,
) -> Route:
    """The cheapest route for ``model``.

    Its hops share one fingerprint and one wire protocol of ``protocols`` (ranges of protocols that meet pairwise have
    one in common), and none is draining or excluded. Cost, in milliseconds for each token of the answer, is the sum of
    `hop_price.price_hop` over the hops and of `hop_price.price_link` over the links between them, with
    `hop_price.price_entry` for the first. Equal costs go to fewer hops, then to the lower node ids. One node may serve
    two hops through two shards.

    Args:
        snapshot: the nodes.
        model: name under which it is served.
        excluded: ids of nodes to leave out, such as those that were blamed for a failure.
        fingerprint: only shards with this one; a running answer must not go on with other weights. None takes the
            cheapest of those that are complete.
        protocols: wire protocols that the caller speaks.
        demand: what the generation will ask; the usual lengths if not given.
        draw: in [0, 1). Each mean then leans by up to three standard errors (`hop_price.spread_of`), so that covers
            which measuring does not tell apart share the load; and a draw below `exploration.EXPLORE_SHARE` takes the
            cheapest route through some shard that is not on the best one. None takes the means as they are.

    Raises:
        ModelNotFoundError: no node holds a shard of ``model``; names the models there are.
        LayersUnavailableError: some layers are held by no usable node; names them, and who holds them in vain.
    """
    demand = demand or Demand()
    plan = choose(snapshot, model, excluded, fingerprint=fingerprint, protocols=protocols, demand=demand, draw=draw)
    return plan.route


@dataclass(frozen=True, slots=True)
class Plan:
    """A route that was chosen, with what it was chosen from.

    Attributes:
        key: what its shards have in common.
        protocol: the version of the wire protocol that its hops speak.
        usable: every shard that it might have gone through, by id and layers.
        chosen: the shards that it goes through, with the effective starts, in order.
        cost: nanoseconds for each token of the answer.
        explored: the shard for whose sake it was taken, where it is not the cheapest.
    """

    key: VariantKey
    protocol: int
    usable: tuple[Offer, ...]
    chosen: tuple[tuple[Offer, int], ...]
    cost: int
    explored: Offer | None = None

    @property
    def route(self) -> Route:
        hops = (
            Hop(node.node_id, node.url, shard.layers.starting_at(start), shard.dtype, node.version)
            for (node, shard), start in self.chosen
        )
        return Route(self.key.name, self.key.fingerprint, self.key.num_layers, tuple(hops), self.protocol)


def choose(
    snapshot: Snapshot,
    model: str,
    excluded: frozenset[str],
    *,
    fingerprint: str | None,
    protocols: range,
    demand: Demand,
    draw: float | None,
) -> Plan:
    """What `plan_route` takes, and raises."""
    served, wanted = _wanted(variants_of(snapshot), model, fingerprint)
    found = []
    for variant in wanted:
        for protocol in protocols:
            choice = _Choice(variant, protocol, variant.usable(excluded, protocol), demand, draw)
            if choice.path is not None:
                found.append((choice.path.rank, -protocol, variant.key, choice))
    if not found:
        raise LayersUnavailableError(explain_gaps(served, wanted, excluded, protocols))
    choice = min(found, key=lambda candidate: candidate[:3])[3]
    return choice.exploring(draw) if draw is not None and explores(draw) else choice.plan()


def _wanted(variants: list[Variant], model: str, fingerprint: str | None) -> tuple[list[Variant], list[Variant]]:
    """What is served as ``model``, and of that what may be used."""
    served = [variant for variant in variants if variant.key.name == model]
    if not served:
        names = sorted({variant.key.name for variant in variants})
        there_is = f"the mesh serves {listed(names)}" if names else "no node has registered any model yet"
        raise ModelNotFoundError(f"no node serves {model!r}; {there_is}")
    wanted = [variant for variant in served if fingerprint in (None, variant.key.fingerprint)]
    if not wanted:
        raise LayersUnavailableError(
            f"no node serves {model} with fingerprint {str(fingerprint)[:12]}; "
            f"it is served with {listed(variant.key.fingerprint[:12] for variant in served)}"
        )
    return served, wanted


class _Choice:
    """The cheapest path through the shards that may share a route, and what else may be done with them."""

    def __init__(
        self, variant: Variant, protocol: int, offers: list[Offer], demand: Demand, draw: float | None
    ) -> None:
        self._key = variant.key
        self._protocol = protocol
        self._offers = _edges(offers, demand, draw)
        self.path: Path | None = self._cheapest()

    def plan(self, explored: Offer | None = None, discount: int = 0) -> Plan:
        if self.path is None:
            raise LayersUnavailableError(f"some layers of {self._key.name} are served by no node")
        usable = sorted(self._offers.values(), key=_by_id)
        chosen = tuple((self._offers[edge], start) for edge, start in self.path.hops())
        return Plan(self._key, self._protocol, tuple(usable), chosen, self.path.cost + discount, explored)

    def exploring(self, draw: float) -> Plan:
        """The cheapest path through some shard that is not on the cheapest, if another one leads anywhere.

        Not through one that would have to be loaded, at the cost of others, or that has no room.
        """
        best, reached = self.plan(), _reached(self._offers)
        used = {id(offer) for offer, _ in best.chosen}
        others = (
            offer
            for offer in best.usable
            if id(offer) not in used
            and offer.shard.loaded
            and shortage_of(offer.node) < 1
            and not reached.isdisjoint(range(offer.shard.layers.start, offer.shard.layers.stop))
        )
        target = target_of(draw, others)
        if target is None:
            return best
        edge = next(edge for edge, offer in self._offers.items() if offer is target)
        edge.fixed -= _FOR_SURE
        self.path = self._cheapest()
        edge.fixed += _FOR_SURE
        return self.plan(target, _FOR_SURE)

    def _cheapest(self) -> Path | None:
        return cheapest_path(self._offers, self._key.num_layers)


def _edges(offers: Iterable[Offer], demand: Demand, draw: float | None) -> dict[Edge, Offer]:
    offers = list(offers)
    lean = {offer.node.node_id: 0.0 if draw is None else lean_of(draw, offer.node.node_id) for offer in offers}
    edges = {}
    for offer in offers:
        node, shard = offer
        price = price_hop(offer, demand, lean[node.node_id])
        links = [link for link in node.links if link.node_id in lean]
        leans = None if draw is None else [lean[link.node_id] for link in links]
        prices = price_links(offer, links, demand, leans)
        edge = Edge(
            start=shard.layers.start,
            stop=shard.layers.stop,
            node_id=node.node_id,
            rate=price.rate,
            fixed=price.fixed,
            entry=price_entry(node.node_id, demand) if not shard.layers.start else 0,
            exit=price_link(offer, None, demand),
            links={link.node_id: price for link, price in zip(links, prices, strict=True)},
        )
        edges[edge] = offer
    return edges


def _reached(edges: Iterable[Edge]) -> frozenset[int]:
    """The boundaries that some chain of hops from layer 0 ends at."""
    first: dict[int, int] = {}
    for edge in edges:
        first[edge.stop] = min(edge.start, first.get(edge.stop, edge.start))
    reached, last = {0}, 0
    for stop in sorted(first):
        if first[stop] <= last:
            reached.add(stop)
            last = stop
    return frozenset(reached)


def _by_id(offer: Offer) -> tuple[str, int, int]:
    return offer.node.node_id, offer.shard.layers.start, offer.shard.layers.stop
