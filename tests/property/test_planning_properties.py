"""Plans of small meshes against brute force over all of their chains of hops."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from announcements import node, shard
from meshnet_core.errors import LayersUnavailableError, ModelNotFoundError
from meshnet_core.layer_range import LayerRange
from meshnet_core.membership import NodeInfo, ShardInfo, Snapshot
from meshnet_core.planning import DEFAULT_DECODE_MS, FRAMES_PER_SESSION, HOP_MS, plan_route, served_models

LAYERS = 6
Rank = tuple[Fraction, int, tuple[str, ...]]


@st.composite
def shards(draw: st.DrawFn) -> ShardInfo:
    start = draw(st.integers(0, LAYERS - 1))
    stop = draw(st.integers(start + 1, LAYERS))
    return shard(
        str(LayerRange(start, stop)),
        num_layers=LAYERS,
        fingerprint=draw(st.sampled_from(["f1", "f1", "f1", "f2"])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        decode_ms=draw(st.sampled_from([None, 0.0, 0.25, 0.5, 1.0, 1.0, 2.75])),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    nodes = []
    for node_id in "abcdef"[: draw(st.integers(0, 6))]:
        low = draw(st.sampled_from([1, 1, 2]))
        nodes.append(
            node(
                node_id,
                *draw(st.lists(shards(), max_size=2)),
                device=draw(st.sampled_from(["cpu", "cuda", "mps"])),
                queued=draw(st.integers(0, 2)),
                sessions=draw(st.integers(0, 3)),
                draining=draw(st.integers(0, 7)) == 0,
                protocol_min=low,
                protocol_max=low + draw(st.sampled_from([0, 1, 1])),
            )
        )
    return Snapshot(tuple(nodes))


def price(holder: NodeInfo, held: ShardInfo, start: int) -> Fraction:
    """Milliseconds of one hop, written anew from the words of `plan_route`."""
    if held.decode_ms is None:
        ms = Fraction(str(DEFAULT_DECODE_MS[holder.device])) * (2 if held.dtype == "float32" else 1)
    else:
        ms = max(Fraction(held.decode_ms), Fraction(1, 1_000_000))
    ahead = holder.queued + Fraction(FRAMES_PER_SESSION) * holder.sessions
    # The wait is cut to whole nanoseconds.
    wait = Fraction(int(ahead * ms * len(held.layers) * 1_000_000), 1_000_000)
    return ms * (held.layers.stop - start) + wait + Fraction(str(HOP_MS))


def usable(
    snapshot: Snapshot, fingerprint: str, protocol: int, excluded: frozenset[str]
) -> list[tuple[NodeInfo, ShardInfo]]:
    return [
        (holder, held)
        for holder in snapshot.nodes
        for held in holder.shards
        if held.fingerprint == fingerprint
        and holder.node_id not in excluded
        and not holder.draining
        and holder.protocol_min <= protocol <= holder.protocol_max
    ]


def chains(offers: list[tuple[NodeInfo, ShardInfo]], at: int = 0) -> Iterator[Rank]:
    if at == LAYERS:
        yield Fraction(0), 0, ()
    for holder, held in offers:
        if at in held.layers:
            for cost, hops, ids in chains(offers, held.layers.stop):
                yield cost + price(holder, held, at), hops + 1, (holder.node_id, *ids)


@settings(max_examples=300, deadline=None)
@given(snapshots(), st.frozensets(st.sampled_from("abcdef"), max_size=2), st.sampled_from([range(1, 2), range(1, 4)]))
def test_a_plan_is_the_optimum_or_says_that_there_is_none(
    snapshot: Snapshot, excluded: frozenset[str], protocols: range
) -> None:
    everything = [
        rank
        for fingerprint in ("f1", "f2")
        for protocol in protocols
        for rank in chains(usable(snapshot, fingerprint, protocol, excluded))
    ]
    try:
        route = plan_route(snapshot, "m", excluded, protocols=protocols)
    except (LayersUnavailableError, ModelNotFoundError):
        assert not everything
        return
    assert tuple(hop.node_id for hop in route.hops) == min(everything)[2]
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
    outcomes = []
    for nodes in (snapshot.nodes, tuple(shuffled)):
        try:
            outcomes.append(str(plan_route(Snapshot(nodes), "m")))
        except (LayersUnavailableError, ModelNotFoundError) as error:
            outcomes.append(type(error).__name__)
    assert outcomes[0] == outcomes[1]
