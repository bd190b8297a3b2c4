"""What a generation asks of a route, and what follows for the route that it gets."""

from __future__ import annotations

import json

import pytest

from announcements import node, shard, snapshot
from meshnet_core.demand import Demand
from meshnet_core.errors import InvalidInputError
from meshnet_core.estimate import Evidence
from meshnet_core.link_info import LinkInfo
from meshnet_core.membership import Snapshot
from meshnet_core.planning import plan_route


def chosen(snap: Snapshot, demand: Demand) -> str:
    return plan_route(snap, "m", demand=demand).hops[-1].node_id


@pytest.mark.parametrize("demand", [Demand(), Demand(0, 1), Demand(900, 20, {"a": 5}, {"b": 0.25}, explore=False)])
def test_a_demand_survives_the_wire(demand: Demand) -> None:
    assert Demand.from_wire(json.loads(json.dumps(demand.to_wire()))) == demand


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ([], "a JSON object"),
        ({"promt": 1}, "unknown fields in a demand: promt"),
        ({"answer": 0}, "answer must be a whole number from 1"),
        ({"prompt": -1}, "prompt must be"),
        ({"held": {"a": -1}}, "a must be a whole number"),
        ({"held": ["a"]}, "held must be an object"),
        ({"entry_ms": {"not an id!": 1}}, "a node id in entry_ms"),
        ({"entry_ms": {"a": float("inf")}}, "a must be null or a number"),
        ({"explore": 1}, "explore must be true or false"),
    ],
)
def test_what_is_no_demand_is_refused(document: object, told: str) -> None:
    with pytest.raises(InvalidInputError, match=told):
        Demand.from_wire(document)


def test_lengths_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="at least 1 token"):
        Demand(prompt=5, answer=0)


def test_a_long_prompt_goes_where_prefill_is_fast_and_a_long_answer_where_decode_is() -> None:
    snap = snapshot(
        node("prefills", shard("0-29", decode_ms=1.0, prefill_ms=0.01)),
        node("decodes", shard("0-29", decode_ms=0.8, prefill_ms=0.5)),
    )
    assert chosen(snap, Demand(prompt=4000, answer=50)) == "prefills"
    assert chosen(snap, Demand(prompt=20, answer=500)) == "decodes"


def test_a_prefix_that_is_still_held_draws_the_next_turn_there_while_it_is_worth_it() -> None:
    snap = snapshot(node("a", shard("0-29", prefill_ms=0.2)), node("b", shard("0-29", decode_ms=1.2, prefill_ms=0.2)))
    assert chosen(snap, Demand(2000, 100)) == "a"
    assert chosen(snap, Demand(2000, 100, held={"b": 1900})) == "b"
    assert chosen(snap, Demand(2000, 100, held={"b": 20})) == "a"
    assert chosen(snap, Demand(0, 100, held={"b": 1900})) == "a"


def test_a_node_short_of_room_is_avoided_the_more_the_less_there_is() -> None:
    def pick(free: int, rival_ms: float) -> str:
        full = node("a", "0-29", budget_bytes=100, free_bytes=free)
        return chosen(snapshot(full, node("b", shard("0-29", decode_ms=rival_ms))), Demand())

    assert [pick(free, 1.5) for free in (100, 20, 10, 0)] == ["a", "a", "b", "b"]
    assert [pick(free, 2.9) for free in (10, 0)] == ["a", "a"]  # where nobody else is fast enough it waits


def test_a_node_with_no_session_more_is_as_full_as_one_without_bytes() -> None:
    full = node("a", "0-29", max_sessions=4, sessions=4)
    rival = node("b", shard("0-29", decode_ms=3.5))
    assert chosen(snapshot(full, rival), Demand()) == "b"
    assert chosen(snapshot(node("a", "0-29", max_sessions=64, sessions=4), rival), Demand()) == "a"


def test_round_trips_decide_between_nodes_that_are_equally_fast_and_the_bandwidth_for_a_long_prompt() -> None:
    links = (
        LinkInfo("near", 0.5, Evidence(), mib_ms=100.0, mib_evidence=Evidence()),
        LinkInfo("far", 5.0, Evidence(), mib_ms=1.0, mib_evidence=Evidence()),
    )
    wide = {"hidden_size": 8192}
    first = node("first", shard("0-14", **wide), links=links)
    snap = snapshot(first, node("near", shard("15-29", **wide)), node("far", shard("15-29", **wide)))
    assert chosen(snap, Demand(0, 100)) == "near"
    assert chosen(snap, Demand(3000, 100)) == "far"


def test_the_callers_own_links_decide_between_first_hops() -> None:
    snap = snapshot(node("a", "0-29"), node("b", "0-29"))
    assert chosen(snap, Demand(entry_ms={"a": 20.0, "b": 1.0})) == "b"
    assert chosen(snap, Demand(entry_ms={"a": 1.0, "b": 20.0})) == "a"


def test_a_link_that_was_not_measured_is_expected_to_be_like_the_senders_others() -> None:
    known = LinkInfo("known", 10.0, Evidence())
    mesh = [node("known", shard("15-29", decode_ms=1.1)), node("new", "15-29")]
    assert chosen(snapshot(node("first", "0-14", links=(known,)), *mesh), Demand()) == "new"
    other = LinkInfo("elsewhere", 40.0, Evidence())  # in the mean 25 ms
    assert chosen(snapshot(node("first", "0-14", links=(known, other)), *mesh), Demand()) == "known"
