"""Plans of small meshes against brute force over all of their chains of hops."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from announcements import node, shard
from meshnet_core.demand import Demand
from meshnet_core.errors import LayersUnavailableError, ModelNotFoundError
from meshnet_core.estimate import Evidence
from meshnet_core.exploration import EXPLORE_SHARE
from meshnet_core.frames import PROTOCOLS
from meshnet_core.hop_price import DEFAULT_DECODE_MS, FULL_MS, HOP_MS, UNLOADED_MS, decode_ms_of, spread_of
from meshnet_core.layer_range import LayerRange
from meshnet_core.link_info import LinkInfo
from meshnet_core.membership import NodeInfo, ShardInfo, Snapshot
from meshnet_core.planning import choose, plan_route, served_models
from meshnet_core.route import Route

LAYERS = 6
IDS = "abcdef"
ROUNDING = 20  # nanoseconds: each term of each hop is rounded, here in another order than there
Offer = tuple[NodeInfo, ShardInfo]
Rank = tuple[int, int, tuple[str, ...]]

evidence = st.builds(Evidence, st.sampled_from([0.0, 0.01, 1.0]), st.integers(1, 40), st.sampled_from([0.0, 90.0]))


@st.composite
def shards(draw: st.DrawFn) -> ShardInfo:
    start = draw(st.sampled_from([0, 0, 0, 1, 2, 2, 3, 4, 5]))
    stop = draw(st.sampled_from([stop for stop in (1, 2, 3, 4, 5, 6, 6, 6) if stop > start]))
    return shard(
        str(LayerRange(start, stop)),
        num_layers=LAYERS,
        fingerprint=draw(st.sampled_from(["f1"] * 7 + ["f2"])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        hidden_size=2**17,  # a position of float32 is half a MiB
        decode_ms=draw(st.sampled_from([None, 0.0, 0.25, 0.5, 1.0, 1.0, 2.75])),
        prefill_ms=draw(st.sampled_from([None, None, 0.125, 2.0])),
        decode_evidence=draw(st.none() | evidence),
        loaded=draw(st.integers(0, 7)) > 0,
    )


@st.composite
def links(draw: st.DrawFn) -> tuple[LinkInfo, ...]:
    """To some nodes, the sender itself and ones that do not exist included."""
    return tuple(
        LinkInfo(
            to,
            draw(st.sampled_from([0.0, 0.25, HOP_MS, 1.0, 9.0])),
            draw(evidence),
            draw(st.sampled_from([None, 0.5, 64.0])),
        )
        for to in draw(st.lists(st.sampled_from([*IDS, "z"]), max_size=4, unique=True))
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    nodes = []
    for node_id in IDS[: draw(st.sampled_from([6, 6, 6, 5, 4, 3, 2, 1, 0]))]:
        low = draw(st.sampled_from([1] * 9 + [2]))
        nodes.append(
            node(
                node_id,
                *draw(st.lists(shards(), min_size=draw(st.sampled_from([1, 1, 1, 0])), max_size=2)),
                device=draw(st.sampled_from(["cpu", "cuda", "mps"])),
                queued=draw(st.integers(0, 2)),
                sessions=draw(st.integers(0, 3)),
                draining=draw(st.integers(0, 7)) == 0,
                protocol_min=low,
                protocol_max=low + draw(st.sampled_from([0, 1, 1])),
                links=draw(links()),
                max_sessions=draw(st.sampled_from([None, None, 3, 64])),
                budget_bytes=1000,
                free_bytes=draw(st.sampled_from([None, 1000, 100, 0])),
            )
        )
    return Snapshot(tuple(nodes))


demands = st.builds(
    Demand,
    st.sampled_from([0, 1, 128, 4096]),
    st.sampled_from([1, 128, 1000]),
    st.dictionaries(st.sampled_from(IDS), st.sampled_from([1, 100, 9999]), max_size=2),
    st.dictionaries(st.sampled_from(IDS), st.sampled_from([0.0, 1.0, 30.0]), max_size=3),
)


def nanoseconds(ms: float | Fraction) -> int:
    return round(ms * 1_000_000)


def price(holder: NodeInfo, held: ShardInfo, start: int, demand: Demand) -> int:
    """Nanoseconds of one hop for each token, written anew from the words of `hop_price`."""
    ms = held.decode_ms
    if ms is None:
        ms = DEFAULT_DECODE_MS[holder.device] * (2 if held.dtype == "float32" else 1)
    prefill_ms = ms / 16 if held.prefill_ms is None else held.prefill_ms
    still = max(demand.prompt - demand.held.get(holder.node_id, 0), 0)
    decode = max(nanoseconds(ms), 1)
    rate = decode + nanoseconds(prefill_ms * still / demand.answer)
    wait = int((holder.queued + holder.sessions / 2) * decode * len(held.layers))
    left = [1.0]
    if holder.max_sessions is not None:
        left.append(1 - holder.sessions / holder.max_sessions)
    if holder.free_bytes is not None:
        left.append(holder.free_bytes / 1000)
    room = nanoseconds(FULL_MS * max(0.0, 1 - min(left) / 0.2))
    return rate * (held.layers.stop - start) + wait + room + (0 if held.loaded else nanoseconds(UNLOADED_MS))


def price_between(sender: Offer | None, receiver: str, demand: Demand) -> int:
    posts = 1 + demand.prompt / 256 / demand.answer
    if sender is None:
        usual = fmean(demand.entry_ms.values()) if demand.entry_ms else HOP_MS
        return nanoseconds(demand.entry_ms.get(receiver, usual) * posts)
    holder, held = sender
    known = next((link for link in holder.links if link.node_id == receiver), None)
    usual = fmean(link.rtt_ms for link in holder.links) if holder.links else HOP_MS
    rtt_ms = usual if known is None else known.rtt_ms
    mib_ms = 8.0 if known is None or known.mib_ms is None else known.mib_ms
    mib = (500_000 if held.dtype == "float32" else 250_000) * (1 + demand.prompt / demand.answer)
    return round(rtt_ms * (1_000_000 * posts) + mib_ms * mib)


def usable(snapshot: Snapshot, fingerprint: str, protocol: int, excluded: frozenset[str]) -> list[Offer]:
    return [
        (holder, held)
        for holder in snapshot.nodes
        for held in holder.shards
        if held.fingerprint == fingerprint
        and holder.node_id not in excluded
        and not holder.draining
        and holder.protocol_min <= protocol <= holder.protocol_max
    ]


def chains(offers: list[Offer], demand: Demand, at: int = 0, sender: Offer | None = None) -> Iterator[Rank]:
    if at == LAYERS:
        yield 0, 0, ()
    for holder, held in offers:
        if at in held.layers:
            here = price(holder, held, at, demand) + price_between(sender, holder.node_id, demand)
            for cost, hops, ids in chains(offers, demand, held.layers.stop, (holder, held)):
                yield cost + here, hops + 1, (holder.node_id, *ids)


@settings(max_examples=200, deadline=None)
@given(
    snapshots(), demands, st.frozensets(st.sampled_from(IDS), max_size=2), st.sampled_from([range(1, 2), range(1, 4)])
)
def test_a_plan_is_the_optimum_or_says_that_there_is_none(
    snapshot: Snapshot, demand: Demand, excluded: frozenset[str], protocols: range
) -> None:
    everything = [
        rank
        for fingerprint in ("f1", "f2")
        for protocol in protocols
        for rank in chains(usable(snapshot, fingerprint, protocol, excluded), demand)
    ]
    try:
        route = plan_route(snapshot, "m", excluded, protocols=protocols, demand=demand)
    except (LayersUnavailableError, ModelNotFoundError):
        assert not everything
        return
    plan = choose(snapshot, "m", excluded, fingerprint=None, protocols=protocols, demand=demand, draw=None)
    assert plan.route == route
    best, ids = min(everything)[0], tuple(hop.node_id for hop in route.hops)
    assert abs(plan.cost - best) <= ROUNDING
    # Which of two that cost the same to the nanosecond is first, `test_cheapest_path` tells.
    assert ids in [rank[2] for rank in everything if rank[0] <= best + ROUNDING]
    check_route(route, snapshot, excluded, protocols)


def check_route(route: Route, snapshot: Snapshot, excluded: frozenset[str], protocols: range) -> None:
    covered = [layer for hop in route.hops for layer in range(hop.layers.start, hop.layers.stop)]
    assert covered == list(range(LAYERS))
    by_id = {holder.node_id: holder for holder in snapshot.nodes}
    for hop in route.hops:
        holder = by_id[hop.node_id]
        assert hop.node_id not in excluded
        assert not holder.draining
        assert any(
            held.fingerprint == route.fingerprint
            and held.dtype == hop.dtype
            and held.layers.stop == hop.layers.stop
            and held.layers.covers(hop.layers)
            for held in holder.shards
        )
    assert any(
        all(by_id[hop.node_id].protocol_min <= protocol <= by_id[hop.node_id].protocol_max for hop in route.hops)
        for protocol in protocols
    )


@settings(max_examples=200, deadline=None)
@given(snapshots(), demands, st.floats(0, 1, exclude_max=True))
def test_a_draw_gives_a_route_too_and_the_same_one_each_time(snapshot: Snapshot, demand: Demand, draw: float) -> None:
    try:
        plan_route(snapshot, "m", demand=demand)
    except (LayersUnavailableError, ModelNotFoundError) as error:
        with pytest.raises(type(error)):
            plan_route(snapshot, "m", demand=demand, draw=draw)
        return
    route = plan_route(snapshot, "m", demand=demand, draw=draw)
    check_route(route, snapshot, frozenset(), PROTOCOLS)
    assert plan_route(snapshot, "m", demand=demand, draw=draw) == route


@settings(max_examples=200, deadline=None)
@given(snapshots(), st.floats(EXPLORE_SHARE, 1, exclude_max=True))
def test_but_for_the_exploring_share_no_route_is_taken_that_is_slower_for_sure(snapshot: Snapshot, draw: float) -> None:
    """What the route costs where all of its means lean to the fast end is no more than what the best costs where all
    of its own lean to the slow end."""
    offers = usable(snapshot, "f1", 1, frozenset())
    demand = Demand()

    def leaning(to: float) -> list[Offer]:
        def of(mean: float | None, behind: Evidence | None) -> float:
            return 1 + to * spread_of(mean, behind)

        return [
            (
                replace(
                    holder,
                    links=tuple(
                        replace(link, rtt_ms=link.rtt_ms * of(link.rtt_ms, link.rtt_evidence)) for link in holder.links
                    ),
                ),
                replace(held, decode_ms=decode_ms_of(holder, held) * of(held.decode_ms, held.decode_evidence)),
            )
            for holder, held in offers
        ]

    try:
        route = plan_route(snapshot, "m", fingerprint="f1", draw=draw)
    except (LayersUnavailableError, ModelNotFoundError):
        assert not list(chains(offers, demand))
        return
    ids = tuple(hop.node_id for hop in route.hops)
    at_best = min(cost for cost, _, chain in chains(leaning(-1.0), demand) if chain == ids)
    at_worst = min(chains(leaning(1.0), demand))[0]
    assert at_best <= at_worst + 1000  # a microsecond: each hop's time is cut to whole nanoseconds


@settings(max_examples=150, deadline=None)
@given(snapshots())
def test_what_is_missing_is_exactly_what_no_usable_shard_holds(snapshot: Snapshot) -> None:
    for summary in served_models(snapshot, protocols=range(1, 2)):
        held = {
            layer
            for _, part in usable(snapshot, summary.fingerprint, 1, frozenset())
            for layer in range(part.layers.start, part.layers.stop)
        }
        missing = [layer for gap in summary.missing for layer in range(gap.start, gap.stop)]
        assert missing == [layer for layer in range(LAYERS) if layer not in held]
        assert summary.complete == (not missing)
        if summary.complete:
            plan_route(snapshot, "m", fingerprint=summary.fingerprint)
        else:
            with pytest.raises(LayersUnavailableError) as caught:
                plan_route(snapshot, "m", fingerprint=summary.fingerprint)
            named = [f"layers {gap} of m " if len(gap) > 1 else f"layer {gap.start} of m " for gap in summary.missing]
            assert [words for words in named if words not in caught.value.message] == []


@settings(max_examples=100, deadline=None)
@given(snapshots(), st.randoms(use_true_random=False))
def test_a_plan_does_not_depend_on_the_order_of_the_nodes(snapshot: Snapshot, rng: random.Random) -> None:
    shuffled = list(snapshot.nodes)
    rng.shuffle(shuffled)
    outcomes: list[list[str]] = []
    for nodes in (snapshot.nodes, tuple(shuffled)):
        try:
            outcomes.append([str(plan_route(Snapshot(nodes), "m", draw=draw)) for draw in (None, 0.02, 0.6)])
        except (LayersUnavailableError, ModelNotFoundError) as error:
            outcomes.append([type(error).__name__])
    assert outcomes[0] == outcomes[1]
