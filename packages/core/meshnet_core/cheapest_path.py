"""The cheapest chain of shards over a model's layers: exact, by dynamic programming over boundaries. Pure.

A hop runs from its effective start to the END of its shard, so a shard is an edge from every boundary inside it:

    shard 0-19 of 30     0 ────────────────> 20
    shard 10-29                  10 ........ 20 ────────> 30      entered at 20, its effective start

What a link costs depends on both of its ends, so the state is a boundary with the shard that ends there. Links are
known between few of the pairs; all others cost the sender's usual price. So a shard is entered from the cheapest of
those that end at its start and have no known link to it, or from one of the few that have:

    cost of (stop, v) = min over boundaries at inside v of
        min( cheapest label at ``at`` that has no known link to v,  each label u at ``at`` that has: u + delta(u, v) )
        + rate x (stop - at) + fixed

That is done in two passes, as A* would: from the end down, what is still to come costs at least, with each shard
entered over its best link; from layer 0 up, only what may still beat a path that is known. In a large mesh a good one
is looked for first, among the few most promising shards at each boundary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import NamedTuple

BEAM = 8  # shards at each boundary, and ways to it, among which a good path is looked for


@dataclass(slots=True, eq=False)
class Edge:
    """A shard with its price in whole nanoseconds.

    Attributes:
        start, stop: the layers that it holds.
        node_id: breaks ties.
        rate: for each layer run.
        fixed: for the hop.
        entry: for being the first hop.
        exit: for handing on to a node to which no link is known; the last hop hands nothing on.
        links: for handing on to the nodes to which one is known, in place of ``exit``.
    """

    start: int
    stop: int
    node_id: str
    rate: int
    fixed: int
    entry: int = 0
    exit: int = 0
    links: Mapping[str, int] = field(default_factory=dict)
    # Made by `_join`: by how much a known link differs from the usual price, by boundary and sender, and the range of
    # these differences; and the least that the hop costs without its layers.
    _from: dict[int, dict[Edge | None, int]] = field(default_factory=dict, repr=False)
    _out_low: int = 0
    _out_high: int = 0
    _low: int = 0


class Path(NamedTuple):
    """The best way found from layer 0 to the end of ``edge``, which it enters at layer ``start``."""

    rank: tuple[int, int, tuple[str, ...]]  # nanoseconds, number of hops, node ids
    before: Path | None = None
    start: int = 0
    edge: Edge | None = None

    @property
    def cost(self) -> int:
        return self.rank[0]

    def hops(self) -> list[tuple[Edge, int]]:
        """Each hop with its effective start, first hop first."""
        found: list[tuple[Edge, int]] = []
        path: Path | None = self
        while path is not None and path.edge is not None:
            found.append((path.edge, path.start))
            path = path.before
        return found[::-1]


def cheapest_path(edges: Iterable[Edge], num_layers: int) -> Path | None:
    """The path from layer 0 to ``num_layers`` of the lowest cost; of equal ones that of fewer hops, then the lower ids.

    None where there is none. The work is that of looking twice at each pair of a group of shards with one end and a
    boundary inside them, and closer at what may be on the best path: few shards, unless many are alike and their links
    tell them apart.
    """
    all_edges = sorted(edges, key=lambda edge: (edge.start, edge.stop, edge.node_id))
    way_in = min((edge.entry for edge in all_edges if not edge.start), default=0)
    _join(all_edges, num_layers, way_in)
    groups = _grouped(all_edges)
    rest = _Rest.of(groups, num_layers)
    if 0 not in rest.least:
        return None
    enough = rest.path_cost(way_in)
    if len(all_edges) > BEAM * len(groups):
        narrow = {stop: group.narrowed(BEAM) for stop, group in groups.items()}
        found = _forward(narrow, rest, num_layers, way_in, enough, BEAM)
        enough = enough if found is None else min(enough, found.cost)
    return _forward(groups, rest, num_layers, way_in, enough)


def _forward(
    groups: Mapping[int, _Group], rest: _Rest, num_layers: int, way_in: int, enough: int, beam: int | None = None
) -> Path | None:
    """The best path that costs no more than ``enough``; with a ``beam`` not surely the best, but soon found."""
    labels: defaultdict[int, _Labels] = defaultdict(_Labels)
    labels[0].by_edge[None] = Path((way_in, 0, ()))
    for at in sorted({0, *groups} - {num_layers}):
        here = labels.pop(at, None)
        if here is None or not here.by_edge:
            continue
        before = sorted(here.by_edge.values(), key=_rank)[:beam]
        by_sender = here.by_edge if beam is None else {path.edge: path for path in before}
        for stop, group in groups.items():
            if stop > at and group.first_start <= at and stop in rest.least:
                left = enough - rest.least[stop] - before[0].cost
                if group.least_rate * (stop - at) + group.least_low <= left:
                    labels[stop].extend(group.edges, at, before, by_sender, left)
    return min(labels[num_layers].by_edge.values(), key=_rank, default=None)


@dataclass(slots=True)
class _Group:
    """The edges that end at one boundary, by their starts."""

    edges: list[Edge]
    first_start: int = 0
    least_rate: int = 0
    least_low: int = 0

    def __post_init__(self) -> None:
        self.first_start = self.edges[0].start
        self.least_rate = min(edge.rate for edge in self.edges)
        self.least_low = min(edge._low for edge in self.edges)

    def narrowed(self, most: int) -> _Group:
        """The few that look cheapest over their whole length."""
        kept = nsmallest(most, self.edges, key=lambda edge: edge.rate * (edge.stop - edge.start) + edge._low)
        return _Group(sorted(kept, key=lambda edge: (edge.start, edge.node_id)))

    def hopeful(self) -> list[Edge]:
        """Those that may be the cheapest from some boundary on, wherever each is entered over its best link."""
        found: list[Edge] = []
        for edge in self.edges:
            if not any(other.rate <= edge.rate and other._low <= edge._low for other in found):
                found.append(edge)  # those before it begin no later
        return found


@dataclass(slots=True)
class _Rest:
    """From each boundary to the end: what that costs at least, and by which edge first."""

    least: dict[int, int]
    by: dict[int, Edge]

    @classmethod
    def of(cls, groups: Mapping[int, _Group], num_layers: int) -> _Rest:
        hopeful = {stop: group.hopeful() for stop, group in groups.items()}
        rest = cls({num_layers: 0}, {})
        for at in sorted({0, *groups} - {num_layers}, reverse=True):
            best: int | None = None
            for stop, edges in hopeful.items():
                if stop <= at or stop not in rest.least:
                    continue
                beyond, layers = rest.least[stop], stop - at
                for edge in edges:
                    if edge.start > at:
                        break
                    cost = edge.rate * layers + edge._low + beyond
                    if best is None or cost < best:
                        best, rest.by[at] = cost, edge
            if best is not None:
                rest.least[at] = best
        return rest

    def path_cost(self, way_in: int) -> int:
        """What the path that looks best from layer 0 really costs."""
        cost, at, sender = way_in, 0, None
        while at in self.by:
            edge = self.by[at]
            cost += edge.rate * (edge.stop - at) + edge.fixed + edge.exit + edge._from.get(at, {}).get(sender, 0)
            at, sender = edge.stop, edge
        return cost


@dataclass(slots=True)
class _Labels:
    """The best way found to each shard that ends at one boundary."""

    by_edge: dict[Edge | None, Path] = field(default_factory=dict)
    bound: int | None = None  # what the best of them costs at most, with the link that follows

    def extend(
        self, edges: list[Edge], at: int, before: list[Path], by_sender: Mapping[Edge | None, Path], left: int
    ) -> None:
        """Enter the edges at ``at``, each from the best of the labels ``before``, which are sorted.

        Not those that cost more than ``left`` at least: a better path is known already.
        """
        bound = self.bound
        for edge in edges:
            if edge.start > at:
                break
            run = edge.rate * (edge.stop - at)
            if run + edge._low > left:
                continue
            entered = before[0] if at not in edge._from else _over_links(edge._from[at], before, by_sender)
            cost, hops, ids = entered.rank
            cost += run + edge.fixed + edge.exit
            if bound is not None and cost + edge._out_low > bound:
                continue  # another one is better, whoever comes next
            known = self.by_edge.get(edge)
            rank = (cost, hops + 1, (*ids, edge.node_id))
            if known is None or rank < known.rank:
                self.by_edge[edge] = Path(rank, entered, at, edge)
                if bound is None or cost + edge._out_high < bound:
                    bound = cost + edge._out_high
        self.bound = bound


def _over_links(senders: Mapping[Edge | None, int], here: list[Path], ending: Mapping[Edge | None, Path]) -> Path:
    """The best of the labels ``here``, with what it costs more or less to come from those of ``senders``."""
    best: Path | None = next((path for path in here if path.edge not in senders), None)
    for path in here if len(here) < len(senders) else (ending.get(sender) for sender in senders):
        if path is not None and (delta := senders.get(path.edge)) is not None:
            cost, hops, ids = path.rank
            linked = path._replace(rank=(cost + delta, hops, ids))
            if best is None or linked.rank < best.rank:
                best = linked
    if best is None:
        raise RuntimeError("an edge is entered where nothing ends")  # `here` is not empty
    return best


def _join(edges: list[Edge], num_layers: int, way_in: int) -> None:
    """Tell each edge from whom it is entered at another price than usual, and how far its price may differ by that."""
    by_node: defaultdict[str, list[Edge]] = defaultdict(list)
    for edge in edges:
        by_node[edge.node_id].append(edge)
        edge._from = {}
        edge._out_low = edge._out_high = 0
        if edge.stop == num_layers:
            edge.exit = 0
        edge._low = edge.fixed + edge.exit
        if not edge.start and (delta := edge.entry - way_in):
            edge._from[0] = {None: delta}  # the caller, before any edge
    for edge in edges:
        if edge.links and edge.stop != num_layers:
            _link(edge, by_node)


def _link(sender: Edge, by_node: Mapping[str, list[Edge]]) -> None:
    at, usual = sender.stop, sender.exit
    low = high = 0
    for node_id, price in sender.links.items():
        delta = price - usual
        for edge in by_node.get(node_id, ()):
            if not edge.start <= at < edge.stop or not delta:
                continue
            edge._from.setdefault(at, {})[sender] = delta
            if delta < 0:
                low = min(delta, low)
                reached = edge.fixed + edge.exit + delta
                edge._low = min(reached, edge._low)
            elif delta > high:
                high = delta
    sender._out_low, sender._out_high = low, high


def _grouped(edges: list[Edge]) -> dict[int, _Group]:
    """By their ends, the lowest first; each group keeps the order."""
    by_stop: defaultdict[int, list[Edge]] = defaultdict(list)
    for edge in edges:
        by_stop[edge.stop].append(edge)
    return {stop: _Group(by_stop[stop]) for stop in sorted(by_stop)}


def _rank(path: Path) -> tuple[int, int, tuple[str, ...]]:
    return path.rank
