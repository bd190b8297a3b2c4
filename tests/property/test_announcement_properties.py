"""Announcements survive the wire, and whatever JSON arrives in their place is refused with an error of ours."""

from __future__ import annotations

import contextlib
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from announcements import node, shard
from meshnet_core.chunk_costs import ChunkCosts
from meshnet_core.errors import InvalidInputError, LayersUnavailableError
from meshnet_core.estimate import Evidence
from meshnet_core.link_info import LinkInfo
from meshnet_core.membership import NodeInfo, ShardInfo, Snapshot
from meshnet_core.planning import plan_route, served_models
from meshnet_core.wire_fields import MAX_WHOLE

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
counts = st.integers(0, MAX_WHOLE)


evidence = st.builds(Evidence, st.floats(0, 1e18), st.integers(1, MAX_WHOLE), st.floats(0, 1e9)) | st.none()


@given(counts, counts, counts, st.booleans(), st.floats(0, 1e9) | st.none(), evidence)
def test_an_announcement_survives_the_wire(
    sessions: int, queued: int, state_bytes: int, draining: bool, ms: float | None, behind: Evidence | None
) -> None:
    held = shard(
        "3-7",
        decode_ms=ms,
        prefill_ms=ms,
        weight_bytes=state_bytes,
        loaded=draining,
        decode_evidence=behind,
        prefill_evidence=behind,
        chunk_costs=None if ms is None else ChunkCosts(ms, ms / 7, 0.0),
    )
    link = LinkInfo("b", ms or 0.0, behind or Evidence(), ms, behind)
    load = {"sessions": sessions, "queued": queued, "state_bytes": state_bytes, "draining": draining}
    room = {"free_bytes": sessions, "budget_bytes": queued, "max_sessions": state_bytes} if draining else {}
    sent = node("a", held, "8-9", **load, links=(link,), **room)
    assert NodeInfo.from_wire(json.loads(json.dumps(sent.to_wire()))) == sent
    assert Snapshot.from_wire(json.loads(json.dumps(Snapshot((sent,)).to_wire()))) == Snapshot((sent,))


def test_a_shard_of_a_node_that_does_not_tell_is_loaded() -> None:
    document = shard("0-3", loaded=False).to_wire()
    assert not ShardInfo.from_wire(document).loaded
    del document["loaded"]
    assert ShardInfo.from_wire(document).loaded


@given(anything)
def test_anything_else_is_refused(document: object) -> None:
    with contextlib.suppress(InvalidInputError):
        NodeInfo.from_wire(document)
    with contextlib.suppress(InvalidInputError):
        Snapshot.from_wire(document)


@settings(max_examples=300)
@given(st.data(), anything)
def test_a_field_that_is_let_in_never_breaks_planning(data: st.DataObject, value: object) -> None:
    """One node tells something odd; either it is refused, or plans go on beside and through it."""
    link = LinkInfo("b", 1.0, Evidence(0.25, 3, 9.0), 8.0, Evidence())
    costs = ChunkCosts(0.5, 0.05, 1e-5)
    document = node("a", shard("0-14", chunk_costs=costs), sessions=1, links=(link,)).to_wire()
    (held,) = document["shards"]
    target = data.draw(st.sampled_from([document, held, held["chunk_costs"], document["links"][0]]))
    target[data.draw(st.sampled_from(sorted(target)))] = value
    try:
        odd = NodeInfo.from_wire(document)
    except InvalidInputError:
        return
    mesh = Snapshot((odd, node("b", "10-29"), node("c", shard("0-29", decode_ms=99.0))))
    plan_route(mesh, "m")
    served_models(mesh)
    with contextlib.suppress(LayersUnavailableError):
        plan_route(mesh, "m", frozenset({"c"}))
