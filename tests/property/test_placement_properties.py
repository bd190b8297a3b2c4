"""Placements of small meshes against brute force, and what holds of every placement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, permutations
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet_core.layer_range import LayerRange
from meshnet_core.model_facts import ModelFacts
from meshnet_tracker import cover
from meshnet_tracker.machine import Machine
from meshnet_tracker.placement import Placement, place
from meshnet_tracker.replan import STAY, replan
from meshnet_tracker.standing import holders_of, standing_cover

WITHIN = 1.05


@st.composite
def models(draw: st.DrawFn, *, alike: bool = False) -> ModelFacts:
    count = draw(st.integers(1, 7))
    sizes = [10] * count if alike else draw(st.lists(st.integers(1, 30), min_size=count, max_size=count))
    embedding, head = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    return ModelFacts(
        "m",
        "f1",
        tuple(sizes),
        embedding,
        head,
        shared=draw(st.sampled_from([0, min(embedding, head)])),
        room=draw(st.integers(0, 5)),
        cuts=None if alike or draw(st.booleans()) else tuple(c for c in range(1, count) if draw(st.booleans())),
    )


@st.composite
def machines_for(draw: st.DrawFn, facts: ModelFacts, *, most: int = 4, fixed: bool = True) -> list[Machine]:
    machines = []
    for name in "abcdefghijkl"[: draw(st.integers(1, most))]:
        is_fixed = fixed and draw(st.integers(0, 3)) == 0
        # What a person chose was loaded, so it keeps to the cuts; what a node says it moves to may be nonsense.
        edges = facts.boundaries if is_fixed else range(facts.num_layers + 1)
        start, stop = sorted(draw(st.lists(st.sampled_from(edges), min_size=2, max_size=2, unique=True)))
        held = LayerRange(start, stop)
        machines.append(
            Machine(
                name,
                memory=draw(st.integers(0, 400)),
                width=draw(st.sampled_from([1, 2])),
                layer_ms=draw(st.sampled_from([0.5, 1.0, 1.0, 1.3, 3.0])),
                hop_ms=draw(st.sampled_from([0.0, 0.4, 2.0])),
                held=held if is_fixed or draw(st.booleans()) else None,
                fixed=is_fixed,
            )
        )
    return machines


@st.composite
def meshes(draw: st.DrawFn) -> tuple[ModelFacts, list[Machine]]:
    facts = draw(models())
    return facts, draw(machines_for(facts))


def parts_of(facts: ModelFacts, machine: Machine, start: int) -> Iterator[tuple[int, float]]:
    """Where a machine may run to from ``start``, with its milliseconds; written anew from the words of `place`."""
    if machine.fixed:
        assert machine.held is not None
        stops = [machine.held.stop] if machine.held.start <= start < machine.held.stop else []
    else:
        allowed = set(range(1, facts.num_layers)) if facts.cuts is None else set(facts.cuts)
        stops = [stop for stop in sorted(allowed | {facts.num_layers}) if stop > start]
    for stop in stops:
        elements = sum(facts.layers[start:stop]) + facts.room * (stop - start)
        elements += facts.embedding if start == 0 else 0
        elements += facts.head if stop == facts.num_layers else 0
        elements -= facts.shared if (start, stop) == (0, facts.num_layers) else 0
        if machine.fixed or elements * machine.width <= machine.memory:
            head = facts.head / (sum(facts.layers) / facts.num_layers) if stop == facts.num_layers else 0
            yield stop, machine.hop_ms + machine.layer_ms * (stop - start + head)


def brute_force(facts: ModelFacts, machines: list[Machine]) -> float:
    """The least time of the slowest part, over every order of the machines, of which the last may stay unused."""

    def least(order: tuple[Machine, ...], at: int) -> float:
        if at == facts.num_layers:
            return 0.0
        if not order:
            return inf
        return min(
            (max(ms, least(order[1:], stop)) for stop, ms in parts_of(facts, order[0], at)),
            default=inf,
        )

    return min(least(order, 0) for order in permutations(machines)) if machines else inf


def check_sound(placement: Placement, facts: ModelFacts, machines: list[Machine]) -> None:
    by_name = {machine.name: machine for machine in machines}
    for name, layers in placement.ranges.items():
        machine = by_name[name]
        assert machine.held == layers if machine.fixed else machine.fits(facts, layers.start, layers.stop)
        if not machine.fixed:
            assert {layers.start, layers.stop} <= set(facts.boundaries)
    covered = {layer for layers in placement.ranges.values() for layer in range(layers.start, layers.stop)}
    missing = {layer for gap in placement.missing for layer in range(gap.start, gap.stop)}
    assert covered | missing == set(range(facts.num_layers))
    assert not covered & missing
    assert (placement.cover is None) == bool(missing)
    if placement.cover is not None:
        edges = [0, *(part.stop for part in placement.cover)]
        assert [part.start for part in placement.cover] == edges[:-1]
        assert edges[-1] == facts.num_layers
        assert all(placement.ranges[part.machine.name].covers(part.layers) for part in placement.cover)


@given(meshes())
@settings(max_examples=400, deadline=None)
def test_the_slowest_part_is_within_5_percent_of_brute_force(mesh: tuple[ModelFacts, list[Machine]]) -> None:
    facts, machines = mesh
    placement = place(machines, facts)
    check_sound(placement, facts, machines)
    best = brute_force(facts, machines)
    if best == inf:
        assert placement.missing
    else:
        assert not placement.missing
        assert best * (1 - 1e-9) <= placement.slowest_ms <= best * WITHIN
    assert place(machines[::-1], facts) == placement


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_the_way_for_many_machines_is_as_good_where_layers_are_alike(data: st.DataObject) -> None:
    facts = data.draw(models(alike=True))
    machines = data.draw(machines_for(facts, fixed=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cover, "EXACT_MACHINES", 0)
        found = cover.best_cover(machines, facts)
    best = brute_force(facts, machines)
    assert (found is None) == (best == inf)
    if found is not None:
        assert cover.slowest_ms(found, facts) <= best * WITHIN


@given(meshes())
@settings(max_examples=200, deadline=None)
def test_the_way_for_many_machines_never_breaks_the_rules(mesh: tuple[ModelFacts, list[Machine]]) -> None:
    facts, machines = mesh
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cover, "EXACT_MACHINES", 0)
        check_sound(place(machines, facts), facts, machines)
        check_sound(replan(machines, facts), facts, machines)


@given(meshes())
@settings(max_examples=300, deadline=None)
def test_a_replan_is_sound_and_its_own_result_is_left_alone(mesh: tuple[ModelFacts, list[Machine]]) -> None:
    facts, machines = mesh
    after = replan(machines, facts)
    check_sound(after, facts, machines)
    fresh = place(machines, facts)
    if not fresh.missing:
        assert not after.missing
        assert after.slowest_ms <= fresh.slowest_ms * STAY * (1 + 1e-9)
    placed = [replace(m, held=after.ranges.get(m.name)) for m in machines]
    again = replan(placed, facts)
    assert again.ranges == after.ranges


@given(meshes(), st.data())
@settings(max_examples=200, deadline=None)
def test_a_death_is_made_up_for_where_the_others_can(
    mesh: tuple[ModelFacts, list[Machine]], data: st.DataObject
) -> None:
    facts, machines = mesh
    first = replan(machines, facts)
    left = [replace(m, held=first.ranges.get(m.name)) for m in machines]
    left.remove(data.draw(st.sampled_from(left)))
    if left and not place(left, facts).missing:
        assert not replan(left, facts).missing


@given(meshes())
@settings(max_examples=200, deadline=None)
def test_redundancy_comes_after_the_cover(mesh: tuple[ModelFacts, list[Machine]]) -> None:
    facts, machines = mesh
    placement = place(machines, facts)
    if placement.missing:
        return
    with_ranges = [replace(m, held=placement.ranges.get(m.name)) for m in machines]
    assert min(holders_of(with_ranges, facts.num_layers)) >= 1
    standing = standing_cover(with_ranges, facts)
    assert standing is not None
    assert cover.slowest_ms(standing, facts) <= placement.slowest_ms * (1 + 1e-9)
    assert all(before.stop == after.start for before, after in pairwise(standing))
    able = {m.name for m in machines if m.fixed or any(m.furthest(facts, b, inf) > b for b in facts.boundaries[:-1])}
    assert able == set(placement.ranges)
    assert set(placement.too_small) == {m.name for m in machines} - able
