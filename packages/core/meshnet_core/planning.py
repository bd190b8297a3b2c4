"""Which nodes serve a generation: the cheapest chain of hops that covers a model's layers exactly once.

Pure: a snapshot in, a route out, so that a gateway can plan from its last snapshot while no tracker answers. Knows no
lease, no clock and no socket, and measures nothing itself.

A hop runs from its effective start to the END of its shard, so a shard is an edge from every boundary inside it:

    shard 0-19 of 30     0 ────────────────> 20
    shard 10-29                  10 ........ 20 ────────> 30      entered at 20, its effective start

From any boundary below the model's end some edge leads on exactly when some shard holds the layer there. So a route
exists exactly when every layer is held by a usable shard, and what is missing is what the union of the shards leaves
out (`coverage`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from meshnet_core.coverage import (
    ModelSummary,
    Offer,
    VariantKey,
    explain_gaps,
    listed,
    served_models,
    variants_of,
)
from meshnet_core.dtypes import dtype_bytes
from meshnet_core.errors import LayersUnavailableError, ModelNotFoundError
from meshnet_core.frames import PROTOCOLS
from meshnet_core.route import Hop, Route

if TYPE_CHECKING:
    from meshnet_core.membership import Snapshot

__all__ = ["DEFAULT_DECODE_MS", "FRAMES_PER_SESSION", "HOP_MS", "ModelSummary", "plan_route", "served_models"]

# Milliseconds per layer and decoded position of a 16-bit shard that has not been measured yet; one of 32 bits reads
# twice the bytes and takes twice as long. On the fast side, so that a new node is tried, and then measured, soon.
DEFAULT_DECODE_MS = {"cuda": 0.05, "mps": 0.2, "cpu": 0.5}
# One more hop costs a small post: 0.42 ms there and back over loopback (ADR-0002). Slower links are not known here.
HOP_MS = 0.4
# Frames that a newcomer finds ahead of it at a node, for each session there: a session of a route of two hops has its
# frame at one of them about half of the time.
FRAMES_PER_SESSION = 0.5
# Milliseconds that a shard which is not loaded costs more for each step: some seconds of loading, shared by the hundred
# steps of a short answer. So one that is loaded is preferred, unless it is far slower.
UNLOADED_MS = 50.0

_NS = 1_000_000  # costs are whole nanoseconds: sums do not depend on their order, and a tie is a tie


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
    one in common), and none is draining or excluded. Cost, in milliseconds of one decode step: for each hop, ms per
    layer times layers, plus the frames ahead of it times what the whole shard takes for one, plus `HOP_MS`, plus
    `UNLOADED_MS` where the shard must be loaded first. Equal costs go to fewer hops, then to the lower node ids. One
    node may serve two hops through two shards.

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
    variants = variants_of(snapshot)
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
    found = [
        (path.rank, -protocol, variant.key, path)
        for variant in wanted
        for protocol in protocols
        if (path := _cheapest_path(variant.usable(excluded, protocol), variant.key.num_layers)) is not None
    ]
    if not found:
        raise LayersUnavailableError(explain_gaps(served, wanted, excluded, protocols))
    _, newest, key, path = min(found, key=lambda choice: choice[:3])
    return _route(key, path, -newest)


@dataclass(frozen=True, slots=True)
class _Edge:
    """A usable shard with its price in nanoseconds: ``rate`` for each layer run and ``fixed`` for the hop."""

    rate: int
    fixed: int
    offer: Offer

    @classmethod
    def priced(cls, offer: Offer) -> _Edge:
        node, shard = offer
        ms = shard.decode_ms
        if ms is None:
            ms = DEFAULT_DECODE_MS.get(node.device, DEFAULT_DECODE_MS["cpu"]) * dtype_bytes(shard.dtype) / 2
        rate = max(1, round(ms * _NS))
        frames_ahead = node.queued + FRAMES_PER_SESSION * node.sessions
        hop_ms = HOP_MS if shard.loaded else HOP_MS + UNLOADED_MS
        return cls(rate, round(hop_ms * _NS) + int(frames_ahead * rate * len(shard.layers)), offer)

    def beats(self, other: _Edge) -> bool:
        """Whether, with both ending at one boundary, this one is preferred from wherever the other could begin."""
        if self.rate > other.rate or self.fixed > other.fixed:
            return False
        mine, theirs = self.offer.node.node_id, other.offer.node.node_id
        return (self.rate, self.fixed, mine) <= (other.rate, other.fixed, theirs)


class _Path(NamedTuple):
    """The best way found from layer 0 to a boundary, and the hop that ends there."""

    rank: tuple[int, int, tuple[str, ...]]  # nanoseconds, number of hops, node ids
    before: _Path | None = None
    start: int = 0
    offer: Offer | None = None


def _cheapest_path(offers: list[Offer], num_layers: int) -> _Path | None:
    """Dynamic programming over the boundaries at which some shard ends, from layer 0 upward.

    Of the edges to one boundary only those are kept that no other `beats`. With n shards of random speeds and loads
    that is about ln n of them, so the work is near n log n instead of n times the number of layers.
    """
    coming = sorted(offers, key=lambda offer: (offer.shard.layers.start, offer.node.node_id, offer.shard.dtype))
    coming.reverse()
    best = {0: _Path((0, 0, ()))}
    edges_to: defaultdict[int, list[_Edge]] = defaultdict(list)
    for at in sorted({0, *(offer.shard.layers.stop for offer in offers)}):
        edges_to.pop(at, None)
        while coming and coming[-1].shard.layers.start <= at:
            offer = coming.pop()
            if offer.shard.layers.stop > at:
                _keep(edges_to[offer.shard.layers.stop], _Edge.priced(offer))
        if (here := best.get(at)) is None:
            continue  # a gap lies below
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


def _route(key: VariantKey, path: _Path, protocol: int) -> Route:
    hops: list[Hop] = []
    while path.before is not None and path.offer is not None:
        node, shard = path.offer
        hops.append(Hop(node.node_id, node.url, shard.layers.starting_at(path.start), shard.dtype, node.version))
        path = path.before
    return Route(key.name, key.fingerprint, key.num_layers, tuple(reversed(hops)), protocol)
