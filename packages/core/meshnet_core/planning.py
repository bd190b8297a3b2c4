"""Which nodes serve a generation: the cheapest chain of hops that covers a model's layers exactly once.

Pure: a snapshot in, a route out, so that a gateway can plan from its last snapshot while no tracker answers. Knows no
lease, no clock and no socket, and measures nothing itself.

A hop runs from its effective start to the END of its shard, so a shard is an edge from every boundary inside it:

    shard 0-19 of 30     0 ────────────────> 20
    shard 10-29          10 ... 20 ────────────────> 30      from 20 with effective start 20

From any boundary below the model's end some edge leads on exactly when some shard holds that layer; so a route exists
exactly when every layer is held by a usable shard, and what is missing is what the union of the shards leaves out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from meshnet_core.dtypes import dtype_bytes
from meshnet_core.errors import LayersUnavailableError, ModelNotFoundError
from meshnet_core.frames import PROTOCOL_MAX, PROTOCOL_MIN
from meshnet_core.layer_range import LayerRange
from meshnet_core.route import Hop, Route

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from meshnet_core.membership import NodeInfo, ShardInfo, Snapshot

PROTOCOLS = range(PROTOCOL_MIN, PROTOCOL_MAX + 1)

# Milliseconds per layer and decoded position of a 16-bit shard that has not been measured yet; one of 32 bits reads
# twice the bytes and takes twice as long. On the fast side, so that a new node is tried, and then measured, soon.
DEFAULT_DECODE_MS = {"cuda": 0.05, "mps": 0.2, "cpu": 0.5}
# One more hop costs a small post: 0.39 ms there and back over loopback with aiohttp. Slower links are not known here.
HOP_MS = 0.4
# Frames that a newcomer finds ahead of it at a node, for each session there: a session of a route of two hops has its
# frame at one of them about half of the time.
FRAMES_PER_SESSION = 0.5

_NS = 1_000_000  # costs are whole nanoseconds: sums do not depend on their order, and a tie is a tie
_NAMED = 8  # gaps, nodes or models that one error message names


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One model, with one fingerprint, as the nodes of a snapshot serve it to new sessions.

    Attributes:
        name, fingerprint, num_layers, hidden_size: which model.
        max_positions: the least that any of its shards tells.
        complete: whether a route exists.
        missing: the layers that no usable shard holds; empty exactly where ``complete``.
        dtypes: what its shards compute in, sorted.
    """

    name: str
    fingerprint: str
    num_layers: int
    hidden_size: int
    max_positions: int
    complete: bool
    missing: tuple[LayerRange, ...]
    dtypes: tuple[str, ...]


def plan_route(
    snapshot: Snapshot,
    model: str,
    excluded: frozenset[str] = frozenset(),
    *,
    fingerprint: str | None = None,
    protocols: range = PROTOCOLS,
) -> Route:
    """The cheapest route for ``model``.

    Its hops share one fingerprint and one wire protocol of ``protocols`` (ranges of protocols that meet pairwise have
    one in common), and none is draining or excluded. Cost, in milliseconds of one decode step: for each hop ms per
    layer times layers, the frames ahead of it times what the whole shard takes for one, and `HOP_MS`. Equal costs go
    to fewer hops, then to the lower node ids. One node may serve two hops through two shards.

    Args:
        snapshot: the nodes.
        model: name under which it is served.
        excluded: ids of nodes to leave out, such as those that were blamed for a failure.
        fingerprint: only shards with this one; a running answer must not go on with other weights. None takes the
            cheapest of those that are complete.
        protocols: wire protocols that the caller speaks.

    Raises:
        ModelNotFoundError: no node holds a shard of ``model``; names the models there are.
        LayersUnavailableError: some layers are held by no usable node; names them, and who holds them in vain.
    """
    variants = _variants(snapshot)
    served = [variant for variant in variants if variant.name == model]
    if not served:
        raise ModelNotFoundError(_no_such_model(model, variants))
    wanted = [variant for variant in served if fingerprint in (None, variant.fingerprint)]
    if not wanted:
        known = _listed(variant.fingerprint[:12] for variant in served)
        raise LayersUnavailableError(
            f"no node serves {model} with fingerprint {str(fingerprint)[:12]}; it is served with {known}"
        )
    choices = [
        (path.rank, -protocol, variant.identity, path)
        for variant in wanted
        for protocol in protocols
        if (path := _cheapest_path(variant.usable(excluded, protocol), variant.num_layers)) is not None
    ]
    if not choices:
        raise LayersUnavailableError(_gaps(served, wanted, excluded, protocols))
    _, _, (name, chosen, num_layers, _), path = min(choices, key=lambda choice: choice[:3])
    return Route(model=name, fingerprint=chosen, num_layers=num_layers, hops=tuple(path.hops()))


def served_models(snapshot: Snapshot, *, protocols: range = PROTOCOLS) -> list[ModelSummary]:
    """Every model of the snapshot, one entry for each fingerprint, sorted by name and fingerprint.

    ``complete`` says what :func:`plan_route` with no node excluded would find.
    """
    summaries = []
    for variant in _variants(snapshot):
        _, missing = variant.best_protocol(frozenset(), protocols)
        summaries.append(
            ModelSummary(
                name=variant.name,
                fingerprint=variant.fingerprint,
                num_layers=variant.num_layers,
                hidden_size=variant.identity[3],
                max_positions=min(shard.max_positions for _, shard in variant.offers),
                complete=not missing,
                missing=tuple(missing),
                dtypes=tuple(sorted({shard.dtype for _, shard in variant.offers})),
            )
        )
    return summaries


class _Offer(NamedTuple):
    """A shard and the node that holds it."""

    node: NodeInfo
    shard: ShardInfo


@dataclass(slots=True)
class _Variant:
    """All shards that may share a route: the same name, contents and shape."""

    identity: tuple[str, str, int, int]  # name, fingerprint, layers, hidden size
    offers: list[_Offer] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.identity[0]

    @property
    def fingerprint(self) -> str:
        return self.identity[1]

    @property
    def num_layers(self) -> int:
        return self.identity[2]

    def usable(self, excluded: frozenset[str], protocol: int) -> list[_Offer]:
        return [offer for offer in self.offers if _hindrance(offer.node, excluded, protocol) is None]

    def best_protocol(self, excluded: frozenset[str], protocols: range) -> tuple[int, list[LayerRange]]:
        """The protocol whose speakers leave out the fewest layers, and those layers; the newest of equals."""
        found = [(protocol, _missing(self.usable(excluded, protocol), self.num_layers)) for protocol in protocols]
        return min(found, key=lambda choice: (sum(len(gap) for gap in choice[1]), -choice[0]))


def _variants(snapshot: Snapshot) -> list[_Variant]:
    grouped: dict[tuple[str, str, int, int], _Variant] = {}
    for node in snapshot.nodes:
        for shard in node.shards:
            identity = (shard.model, shard.fingerprint, shard.num_layers, shard.hidden_size)
            if identity not in grouped:
                grouped[identity] = _Variant(identity)
            grouped[identity].offers.append(_Offer(node, shard))
    return [grouped[identity] for identity in sorted(grouped)]


def _hindrance(node: NodeInfo, excluded: frozenset[str], protocol: int) -> str | None:
    """Why new sessions of this protocol cannot go to the node; None where they can."""
    if node.node_id in excluded:
        return "is excluded"
    if node.draining:
        return "is draining"
    if not node.protocol_min <= protocol <= node.protocol_max:
        return f"speaks wire protocol {node.protocol_min}-{node.protocol_max}, not {protocol}"
    return None


@dataclass(frozen=True, slots=True)
class _Edge:
    """A usable shard with its price, in nanoseconds: ``rate`` for each layer run and ``fixed`` for the hop."""

    rate: int
    fixed: int
    offer: _Offer

    @classmethod
    def priced(cls, offer: _Offer) -> _Edge:
        node, shard = offer
        ms = shard.decode_ms
        if ms is None:
            ms = DEFAULT_DECODE_MS.get(node.device, DEFAULT_DECODE_MS["cpu"]) * dtype_bytes(shard.dtype) / 2
        rate = max(1, round(ms * _NS))
        ahead = node.queued + FRAMES_PER_SESSION * node.sessions
        return cls(rate, round(HOP_MS * _NS) + int(ahead * rate * len(shard.layers)), offer)

    def beats(self, other: _Edge) -> bool:
        """Whether this one is to be preferred from every boundary from which both lead to the same one."""
        if self.rate > other.rate or self.fixed > other.fixed:
            return False
        mine, theirs = self.offer.node.node_id, other.offer.node.node_id
        return (self.rate, self.fixed, mine) <= (other.rate, other.fixed, theirs)


class _Path(NamedTuple):
    """The best way found from layer 0 to a boundary: what it costs, and the hop that ends there."""

    rank: tuple[int, int, tuple[str, ...]]  # nanoseconds, number of hops, node ids
    before: _Path | None = None
    start: int = 0
    offer: _Offer | None = None

    def hops(self) -> Iterator[Hop]:
        if self.before is not None and self.offer is not None:
            yield from self.before.hops()
            node, shard = self.offer
            yield Hop(node.node_id, node.url, shard.layers.starting_at(self.start), shard.dtype, node.version)


def _cheapest_path(offers: list[_Offer], num_layers: int) -> _Path | None:
    """Dynamic programming over the boundaries at which some shard ends, from layer 0 upward.

    Of the edges to one and the same boundary only those are kept that none `beats`; with n shards of random speeds
    and loads that is about ln n of them, so that the work is near n log n and not n times the number of layers.
    """
    waiting = sorted(offers, key=lambda offer: (offer.shard.layers.start, offer.node.node_id, offer.shard.dtype))
    waiting.reverse()
    best = {0: _Path((0, 0, ()))}
    edges_to: defaultdict[int, list[_Edge]] = defaultdict(list)
    for at in sorted({0, *(offer.shard.layers.stop for offer in offers)}):
        edges_to.pop(at, None)
        while waiting and waiting[-1].shard.layers.start <= at:
            offer = waiting.pop()
            if offer.shard.layers.stop > at:
                _keep(edges_to[offer.shard.layers.stop], _Edge.priced(offer))
        if (here := best.get(at)) is None:
            continue
        cost, hops, ids = here.rank
        for stop, edges in edges_to.items():
            there = best.get(stop)
            for edge in edges:
                total = cost + edge.rate * (stop - at) + edge.fixed
                if there is None or total <= there.rank[0]:
                    rank = (total, hops + 1, (*ids, edge.offer.node.node_id))
                    if there is None or rank < there.rank:
                        best[stop] = there = _Path(rank, here, at, edge.offer)
    return best.get(num_layers)


def _keep(edges: list[_Edge], new: _Edge) -> None:
    if not any(edge.beats(new) for edge in edges):
        edges[:] = [edge for edge in edges if not new.beats(edge)]
        edges.append(new)


def _missing(offers: Iterable[_Offer], num_layers: int) -> list[LayerRange]:
    """The layers of ``[0, num_layers)`` in none of the offers, in order."""
    gaps, at = [], 0
    for layers in sorted(offer.shard.layers for offer in offers):
        if layers.start > at:
            gaps.append(LayerRange(at, layers.start))
        at = max(at, layers.stop)
    if at < num_layers:
        gaps.append(LayerRange(at, num_layers))
    return gaps


def _gaps(served: list[_Variant], wanted: list[_Variant], excluded: frozenset[str], protocols: range) -> str:
    """What is missing of the variant that comes closest, and who holds it but cannot be used, and why not."""
    found = [(variant, *variant.best_protocol(excluded, protocols)) for variant in wanted]
    variant, protocol, missing = min(found, key=lambda choice: (sum(len(gap) for gap in choice[2]), choice[0].identity))
    sentences = []
    for gap in missing[:_NAMED]:
        in_vain = [
            f"{node.node_id} holds {shard.layers} but {reason}"
            for other in served
            for node, shard in other.offers
            if shard.layers.start < gap.stop and gap.start < shard.layers.stop
            for reason in [
                _hindrance(node, excluded, protocol)
                if other is variant
                else f"its fingerprint is {other.fingerprint[:12]}, not {variant.fingerprint[:12]}"
            ]
        ]
        subject = f"layer {gap}" if len(gap) == 1 else f"layers {gap}"
        verb = "is" if len(gap) == 1 else "are"
        tail = f" that can be used: {_listed(in_vain)}" if in_vain else ""
        sentences.append(f"{subject} of {variant.name} {verb} served by no node{tail}")
    if len(missing) > _NAMED:
        sentences.append(f"and {len(missing) - _NAMED} more gaps")
    return "; ".join(sentences)


def _no_such_model(model: str, variants: list[_Variant]) -> str:
    names = sorted({variant.name for variant in variants})
    if not names:
        return f"no node serves {model!r}, nor any other model: none has registered one yet"
    return f"no node serves {model!r}; the mesh serves {_listed(names)}"


def _listed(items: Iterable[str]) -> str:
    """The first few, and how many more."""
    iterator = iter(items)
    named = list(islice(iterator, _NAMED))
    more = sum(1 for _ in iterator)
    return ", ".join(named) + (f" and {more} more" if more else "")
