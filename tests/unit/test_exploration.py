"""Who of equals serves, who is tried now and then, and that nobody else is."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from announcements import node, shard, snapshot
from meshnet_core.estimate import Evidence
from meshnet_core.exploration import EXPLORE_ONE_IN, EXPLORE_SHARE, RouteDraws, explores, lean_of
from meshnet_core.membership import NodeInfo, Snapshot
from meshnet_core.planning import plan_route

KNOWN = Evidence(0.01, 100)  # of a mean of 1 ms: an error of 0.023


def measured(node_id: str, layers: str, ms: float, behind: Evidence = KNOWN, **changes: object) -> NodeInfo:
    return node(node_id, shard(layers, decode_ms=ms, decode_evidence=behind), **changes)


def shares(snap: Snapshot, draws: int = 400, seed: int = 1) -> Counter[str]:
    """How often each route is taken, over seeded draws that are independent of each other."""
    rng = random.Random(seed)
    return Counter(str(plan_route(snap, "m", draw=rng.random())) for _ in range(draws))


@pytest.mark.parametrize("seed", range(5))
def test_equal_covers_share_the_load(seed: int) -> None:
    taken = shares(snapshot(node("f", "0-14"), measured("a", "15-29", 1.0), measured("b", "15-29", 1.0)), seed=seed)
    assert sum(taken.values()) == 400
    assert {route: 160 <= count <= 240 for route, count in taken.items()} == {
        "f[0-14] -> a[15-29]": True,
        "f[0-14] -> b[15-29]": True,
    }


def test_covers_that_measuring_does_not_tell_apart_share_too() -> None:
    taken = shares(snapshot(measured("a", "0-29", 1.0), measured("b", "0-29", 1.01)))
    assert 160 <= taken["a[0-29]"] <= 240


def test_three_equals_have_a_third_each() -> None:
    taken = shares(snapshot(*(measured(name, "0-29", 1.0) for name in ("x", "y", "z"))), draws=900)
    assert [240 <= count <= 360 for count in taken.values()] == [True] * 3


def test_a_slow_cover_is_taken_by_the_exploring_share_alone() -> None:
    taken = shares(snapshot(measured("fast", "0-29", 1.0), measured("slow", "0-29", 1.5)), draws=2000)
    assert 0 < taken["slow[0-29]"] <= 2000 * EXPLORE_SHARE * 1.3
    slow_draws = [draw / 1000 for draw in range(1000)]
    snap = snapshot(measured("fast", "0-29", 1.0), measured("slow", "0-29", 1.5))
    tried = [draw for draw in slow_draws if str(plan_route(snap, "m", draw=draw)) == "slow[0-29]"]
    assert tried == [draw for draw in slow_draws if explores(draw)]


def test_an_exploring_draw_goes_through_a_shard_inside_another_route() -> None:
    snap = snapshot(measured("a", "0-14", 1.0), measured("b", "15-29", 1.0), measured("old", "10-29", 5.0))
    assert str(plan_route(snap, "m", draw=0.01)) == "a[0-14] -> old[15-29]"


def test_what_is_least_known_is_tried_most() -> None:
    fresh, stale, new = Evidence(0.01, 100, 1.0), Evidence(0.01, 100, 240.0), Evidence(0.01, 2, 1.0)
    others = {"fresh": fresh, "stale": stale, "new": new}
    snap = snapshot(
        measured("best", "0-29", 1.0), *(measured(name, "0-29", 9.0, behind) for name, behind in others.items())
    )
    taken = Counter(str(plan_route(snap, "m", draw=EXPLORE_SHARE * at / 1000)) for at in range(1000))
    assert taken["new[0-29]"] > taken["stale[0-29]"] > taken["fresh[0-29]"] > 30
    assert taken["best[0-29]"] == 0


@pytest.mark.parametrize(
    "hindered",
    [
        node("b", shard("0-29", loaded=False)),
        node("b", "0-29", max_sessions=2, sessions=2),
        node("b", "0-29", budget_bytes=100, free_bytes=0),
        node("b", "0-29", draining=True),
        node("b", "10-19"),
    ],
    ids=["not loaded", "no session more", "no byte more", "draining", "on no route"],
)
def test_nobody_is_tried_at_the_cost_of_others_or_in_vain(hindered: NodeInfo) -> None:
    snap = snapshot(node("a", "0-29"), hindered)
    assert str(plan_route(snap, "m", draw=0.01)) == "a[0-29]"


def test_a_blamed_node_is_not_explored() -> None:
    snap = snapshot(node("a", "0-29"), node("b", "0-29"))
    assert {str(plan_route(snap, "m", frozenset({"b"}), draw=at / 100)) for at in range(100)} == {"a[0-29]"}


def test_exactly_one_draw_in_twenty_explores() -> None:
    draws = RouteDraws(seed=3)
    exploring = [index for index in range(400) if explores(draws.next("m"))]
    assert exploring == list(range(EXPLORE_ONE_IN - 1, 400, EXPLORE_ONE_IN))


def test_each_model_has_draws_of_its_own() -> None:
    draws = RouteDraws(seed=3)
    told = [(draws.next("m"), draws.next("n")) for _ in range(40)]
    assert [sum(map(explores, column)) for column in zip(*told, strict=True)] == [2, 2]


def test_draws_lie_everywhere_within_their_range() -> None:
    draws = RouteDraws(seed=4)
    counts = Counter(int(draws.next("m") * 10) for _ in range(1000))
    assert counts == dict.fromkeys(range(10), 100)


def test_leans_are_spread_evenly_and_do_not_hang_together() -> None:
    rng = random.Random(5)
    leans = [
        [lean_of(rng_draw, name) for name in ("n1", "n2", "n3")] for rng_draw in (rng.random() for _ in range(3000))
    ]
    for column in zip(*leans, strict=True):
        assert abs(sum(column) / 3000) < 0.05
        assert Counter(int(2 + 2 * value) for value in column).keys() == {0, 1, 2, 3}
    products = [sum(row[i] * row[j] for row in leans) / 3000 for i, j in ((0, 1), (0, 2), (1, 2))]
    assert max(map(abs, products)) < 0.03
