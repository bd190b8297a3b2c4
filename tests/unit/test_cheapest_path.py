"""The cheapest chain of shards in meshes too large for brute force: against a plain search over pairs of shards."""

from __future__ import annotations

import random

import pytest

from meshnet_core import cheapest_path as module
from meshnet_core.cheapest_path import Edge, cheapest_path

LAYERS = 12


KINDS = {  # rates, fixed prices, prices of links, links of each node
    "speeds differ": (range(1, 12), range(9), (0, 1, 4, 9, 60), (2, 40)),
    "alike but for links": ((5,), (0,), (0, 1, 4, 9, 60), (2, 40)),
    "hops cost more than layers": ((1, 2), range(400), (0, 4, 10), (2, 40)),
    "links cost more than layers": ((1, 2), (0, 30), (0, 200, 400), (100, 159)),
    "few links are good": ((1, 2), (0, 30), (0, *[300] * 20), (100, 159)),
}


def mesh(seed: int, count: int, kind: str) -> list[Edge]:
    rng = random.Random(seed)
    rates, fixed, prices, links = KINDS[kind]
    edges = []
    for index in range(count):
        start = rng.randrange(LAYERS)
        edges.append(
            Edge(
                start=start,
                stop=rng.randrange(start + 1, LAYERS + 1),
                node_id=f"n{index:03}",
                rate=rng.choice(rates),
                fixed=rng.choice(fixed),
                entry=rng.choice([4, 4, 0, 30]),
                exit=rng.choice([4, 10]),
                links={f"n{rng.randrange(count):03}": rng.choice(prices) for _ in range(rng.choice(links))},
            )
        )
    return edges


def by_pairs(edges: list[Edge]) -> tuple[int, int, tuple[str, ...]] | None:
    """The same optimum by going over all pairs of a shard and one that may follow it, whatever that costs."""
    best: dict[Edge, tuple[int, int, tuple[str, ...]]] = {}
    for edge in sorted(edges, key=lambda one: one.stop):
        leaving = edge.exit if edge.stop < LAYERS else 0
        ways = []
        if edge.start == 0:
            ways.append((edge.entry + edge.rate * edge.stop + edge.fixed + leaving, 1, (edge.node_id,)))
        for before, (cost, hops, ids) in best.items():
            if edge.start <= before.stop < edge.stop:
                link = before.links.get(edge.node_id, before.exit) - before.exit
                run = edge.rate * (edge.stop - before.stop) + edge.fixed + leaving
                ways.append((cost + link + run, hops + 1, (*ids, edge.node_id)))
        if ways:
            best[edge] = min(ways)
    return min((rank for edge, rank in best.items() if edge.stop == LAYERS), default=None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_the_path_is_the_optimum_over_all_pairs_with_and_without_a_look_ahead(
    seed: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for beam in (1, 8, 10_000):
        monkeypatch.setattr(module, "BEAM", beam)
        edges = mesh(seed, 160, kind)
        expected = by_pairs(edges)
        found = cheapest_path(edges, LAYERS)
        assert (None if found is None else found.rank) == expected
        assert expected is not None
        if found is not None:
            assert [edge.node_id for edge, _ in found.hops()] == list(expected[2])


def test_where_layers_are_missing_there_is_no_path() -> None:
    assert cheapest_path([Edge(0, 4, "a", 1, 0), Edge(5, LAYERS, "b", 1, 0)], LAYERS) is None
    assert cheapest_path([], LAYERS) is None
