"""Why a route is the one that it is: each hop's price by its terms, who else there was, and who was left out. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from meshnet_core.coverage import left_out, variants_of
from meshnet_core.demand import Demand
from meshnet_core.errors import LayersUnavailableError
from meshnet_core.frames import PROTOCOLS
from meshnet_core.hop_price import NS, decode_ms_of, price_entry, price_hop, price_link
from meshnet_core.planning import Plan, choose

if TYPE_CHECKING:
    from meshnet_core.coverage import Offer
    from meshnet_core.link_info import LinkInfo
    from meshnet_core.membership import Snapshot

RUNNERS_UP = 3
CALLER = "gateway"


@dataclass(frozen=True, slots=True)
class Speed:
    """A shard's speed: mean and standard deviation of milliseconds per layer and decoded position, and their age."""

    ms_per_layer: float
    sd: float | None
    samples: int
    age_s: float | None

    @classmethod
    def of(cls, offer: Offer) -> Speed:
        node, shard = offer
        behind = shard.decode_evidence
        if shard.decode_ms is None or behind is None:
            return cls(decode_ms_of(node, shard), None, 0, None)
        return cls(shard.decode_ms, behind.sd, behind.count, behind.age_s)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shard that might have been used, and what it would cost without its layers and links."""

    node: str
    held: str
    dtype: str
    speed: Speed
    sessions: int
    queue_ms: float
    room_ms: float
    load_ms: float
    chosen: bool


@dataclass(frozen=True, slots=True)
class HopTerms:
    """What one hop costs, in milliseconds for each token of the answer."""

    node: str
    layers: str
    held: str
    speed: Speed
    layers_ms: float
    link_from: str
    link_measured: bool
    link_sd: float | None
    link_ms: float
    queue_ms: float
    room_ms: float
    load_ms: float

    @property
    def total_ms(self) -> float:
        return self.layers_ms + self.link_ms + self.queue_ms + self.room_ms + self.load_ms


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The best route without some node of the one that was chosen."""

    route: str
    ms_per_token: float
    without: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A shard of the model that could not be used, and why."""

    node: str
    held: str
    why: str


@dataclass(frozen=True, slots=True)
class RouteExplanation:
    """The route that plans without a draw take, with what was weighed.

    Attributes:
        route: as people read it.
        ms_per_token: its price.
        hops: the terms of it; their totals add up to ``ms_per_token``.
        candidates: every shard that might have been used.
        runners_up: the best routes without one of its nodes, cheapest first.
        left_out: every shard of that name that might not.
    """

    model: str
    fingerprint: str
    protocol: int
    demand: Demand
    route: str
    ms_per_token: float
    hops: tuple[HopTerms, ...]
    candidates: tuple[Candidate, ...]
    runners_up: tuple[RunnerUp, ...]
    left_out: tuple[LeftOut, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; milliseconds are rounded to microseconds."""
        rounded: dict[str, Any] = _rounded(asdict(self))
        for hop, told in zip(self.hops, rounded["hops"], strict=True):
            told["total_ms"] = round(hop.total_ms, 3)
        return rounded


def explain_route(
    snapshot: Snapshot,
    model: str,
    excluded: frozenset[str] = frozenset(),
    *,
    fingerprint: str | None = None,
    protocols: range = PROTOCOLS,
    demand: Demand | None = None,
) -> RouteExplanation:
    """Explain what `planning.plan_route` takes of the same arguments, without a draw.

    Raises:
        ModelNotFoundError, LayersUnavailableError: as it does.
    """
    demand = demand or Demand()

    def planned(without: frozenset[str]) -> Plan:
        return choose(snapshot, model, without, fingerprint=fingerprint, protocols=protocols, demand=demand, draw=None)

    plan = planned(excluded)
    used = {id(offer) for offer, _ in plan.chosen}
    served = [variant for variant in variants_of(snapshot) if variant.key.name == model]
    runners_up: dict[str, RunnerUp] = {}
    for node_id in dict.fromkeys(offer.node.node_id for offer, _ in plan.chosen):
        try:
            other = planned(excluded | {node_id})
        except LayersUnavailableError:
            continue
        route = str(other.route)
        runners_up.setdefault(route, RunnerUp(route, other.cost / NS, node_id))
    return RouteExplanation(
        model=model,
        fingerprint=plan.key.fingerprint,
        protocol=plan.protocol,
        demand=demand,
        route=str(plan.route),
        ms_per_token=plan.cost / NS,
        hops=tuple(_terms(plan, demand)),
        candidates=tuple(_candidate(offer, demand, chosen=id(offer) in used) for offer in plan.usable),
        runners_up=tuple(sorted(runners_up.values(), key=lambda one: one.ms_per_token)[:RUNNERS_UP]),
        left_out=tuple(
            LeftOut(offer.node.node_id, str(offer.shard.layers), why)
            for offer, why in left_out(served, plan.key, excluded, plan.protocol)
        ),
    )


def _terms(plan: Plan, demand: Demand) -> list[HopTerms]:
    terms: list[HopTerms] = []
    sender: Offer | None = None
    for offer, start in plan.chosen:
        node, shard = offer
        price = price_hop(offer, demand)
        layers = shard.layers.starting_at(start)
        link: LinkInfo | None = None
        if sender is None:
            link_ns, measured = price_entry(node.node_id, demand), node.node_id in demand.entry_ms
        else:
            link = next((one for one in sender.node.links if one.node_id == node.node_id), None)
            link_ns, measured = price_link(sender, link, demand), link is not None
        terms.append(
            HopTerms(
                node=node.node_id,
                layers=str(layers),
                held=str(shard.layers),
                speed=Speed.of(offer),
                layers_ms=price.rate * len(layers) / NS,
                link_from=CALLER if sender is None else sender.node.node_id,
                link_measured=measured,
                link_sd=None if link is None else link.rtt_evidence.sd,
                link_ms=link_ns / NS,
                queue_ms=price.queue / NS,
                room_ms=price.room / NS,
                load_ms=price.load / NS,
            )
        )
        sender = offer
    return terms


def _candidate(offer: Offer, demand: Demand, *, chosen: bool) -> Candidate:
    price = price_hop(offer, demand)
    return Candidate(
        node=offer.node.node_id,
        held=str(offer.shard.layers),
        dtype=offer.shard.dtype,
        speed=Speed.of(offer),
        sessions=offer.node.sessions,
        queue_ms=price.queue / NS,
        room_ms=price.room / NS,
        load_ms=price.load / NS,
        chosen=chosen,
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value
