"""What goes where, on meshes that a person can check by eye; tests/property has the rules for all of them."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from math import inf

import pytest

from meshnet_core.errors import InvalidInputError
from meshnet_core.layer_range import LayerRange
from meshnet_core.model_facts import ModelFacts
from meshnet_tracker.machine import Machine
from meshnet_tracker.placement import Placement, place
from meshnet_tracker.replan import replan


def model(layers: int = 12, **changes: object) -> ModelFacts:
    return ModelFacts("m", "f1", (10,) * layers, **changes)  # type: ignore[arg-type]


def machine(name: str, layers: int, ms: float = 1.0, held: str = "", **changes: object) -> Machine:
    """One with memory for so many layers of `model`."""
    stands = LayerRange.parse(held) if held else None
    return Machine(name, layers * 10, 1, ms, held=stands, **changes)  # type: ignore[arg-type]


def shown(placement: Placement) -> dict[str, str]:
    return {name: str(layers) for name, layers in placement.ranges.items()}


def then(placement: Placement, *machines: Machine) -> list[Machine]:
    return [replace(m, held=placement.ranges.get(m.name)) for m in machines]


def test_a_machine_twice_as_fast_gets_twice_the_layers() -> None:
    placement = place([machine("a", 12, ms=1.0), machine("b", 12, ms=2.0)], model())
    assert sorted(map(len, placement.ranges.values())) == [4, 8]
    assert placement.slowest_ms == 8.0


def test_memory_comes_before_speed() -> None:
    placement = place([machine("a", 3, ms=0.1), machine("b", 9, ms=5.0)], model())
    assert sorted((name, len(layers)) for name, layers in placement.ranges.items()) == [("a", 3), ("b", 9)]


def test_embeddings_and_head_are_counted_where_they_fall_and_tied_ones_at_both_ends() -> None:
    tied = model(4, embedding=40, head=40, shared=40)
    alone = place([machine("a", 8)], tied)
    assert shown(alone) == {"a": "0-3"}
    assert place([machine("a", 7)], tied).missing
    # in two: the embeddings at both, so 2 x (40 + 20)
    assert not place([machine("a", 6), machine("b", 6)], tied).missing
    assert place([machine("a", 6), machine("b", 5)], tied).missing == (LayerRange(3, 4),)


def test_the_head_weighs_as_many_layers_as_it_has_their_weights() -> None:
    placement = place([machine("a", 99), machine("b", 99)], model(12, head=40))
    assert [len(part.layers) for part in placement.cover or ()] == [8, 4]


def test_room_for_sessions_is_kept_for_each_layer() -> None:
    assert shown(place([machine("a", 6)], model(4, room=5))) == {"a": "0-3"}
    assert place([machine("a", 6)], model(5, room=5)).missing == (LayerRange(4, 5),)


def test_only_the_cuts_of_the_family_are_used() -> None:
    placement = place([machine("a", 12), machine("b", 12)], model(12, cuts=(2, 9)))
    assert sorted(shown(placement).values()) == ["0-8", "9-11"]
    whole = place([machine("a", 6), machine("b", 6)], model(12, cuts=()))
    assert (whole.ranges, whole.missing, whole.too_small) == ({}, (LayerRange(0, 12),), ("a", "b"))


def test_a_hop_that_saves_next_to_nothing_is_not_taken() -> None:
    slow = [machine(name, 12, ms=100.0) for name in "bcd"]
    placement = place([machine("a", 12, ms=0.1, hop_ms=10.0), *slow], model())
    assert placement.cover is not None
    assert [part.machine.name for part in placement.cover] == ["a"]


def test_what_a_person_fixed_stays_and_the_rest_is_placed_around_it() -> None:
    fixed = machine("f", 0, held="4-7", fixed=True)
    placement = place([fixed, machine("a", 4), machine("b", 4)], model())
    assert shown(placement)["f"] == "4-7"
    assert sorted(shown(placement).values()) == ["0-3", "4-7", "8-11"]


def test_the_fourth_machine_helps_where_one_death_would_end_all_answers() -> None:
    held = [machine("a", 4, held="0-3"), machine("b", 4, held="4-7"), machine("c", 4, held="8-11")]
    twice, newcomer = machine("d", 4, ms=50.0, held="0-3"), machine("e", 8, ms=50.0)  # too slow to help otherwise
    placement = replan([*held, twice, newcomer], model())
    assert shown(placement) == {"a": "0-3", "b": "4-7", "c": "8-11", "d": "0-3", "e": "4-11"}


def test_newcomers_fill_gaps_before_anything_else_and_nobody_moves_for_it() -> None:
    held = [machine("a", 6, held="0-3"), machine("b", 6, held="8-11")]
    placement = replan([*held, machine("c", 6)], model())
    assert shown(placement) == {"a": "0-3", "b": "8-11", "c": "4-7"}


def test_a_gap_is_filled_by_a_neighbour_with_room() -> None:
    left = [machine("a", 4, held="0-3"), machine("c", 8, held="8-11")]
    assert shown(replan(left, model())) == {"a": "0-3", "c": "4-11"}


def test_a_gap_is_filled_by_one_whose_layers_others_hold_too() -> None:
    left = [machine("a", 4, held="0-3"), machine("b", 4, held="0-3"), machine("c", 8, held="4-11")]
    left[2] = replace(left[2], held=LayerRange.parse("8-11"), memory=40)
    assert sorted(shown(replan(left, model())).values()) == ["0-3", "4-7", "8-11"]


def test_a_gap_that_nobody_can_fill_moves_nobody() -> None:
    left = [machine("a", 4, held="0-3"), machine("c", 4, held="8-11")]
    placement = replan(left, model())
    assert shown(placement) == {"a": "0-3", "c": "8-11"}
    assert placement.missing == (LayerRange(4, 8),)


def test_a_little_more_speed_moves_nobody_and_a_lot_does() -> None:
    held = [machine("a", 12, held="0-6"), machine("b", 12, held="7-11")]
    assert shown(replan(held, model())) == {"a": "0-6", "b": "7-11"}
    uneven = [machine("a", 12, held="0-9"), machine("b", 12, held="10-11")]
    assert shown(replan(uneven, model())) == {"a": "0-5", "b": "6-11"}


def test_nodes_that_join_one_by_one_settle() -> None:
    machines = [machine(name, 12) for name in "abcdefgh"]
    placement, moves = place([], model()), 0
    for count in range(1, len(machines) + 1):
        before = then(placement, *machines[:count])
        placement = replan(before, model())
        moves += sum(m.held is not None and placement.ranges[m.name] != m.held for m in before)
        assert replan(then(placement, *machines[:count]), model()) == placement
        assert not placement.missing
    assert moves <= 12


def test_a_machine_that_cannot_hold_one_layer_is_told_so() -> None:
    placement = replan([machine("a", 12), Machine("tiny", 5, 1, 1.0)], model())
    assert placement.too_small == ("tiny",)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="fixed, but to no layers"):
        machine("a", 1, fixed=True)
    with pytest.raises(InvalidInputError, match="positive"):
        machine("a", 1, ms=0.0)
    with pytest.raises(InvalidInputError, match="cuts lie between"):
        model(4, cuts=(4,))


def test_facts_survive_the_wire_and_alike_layers_travel_as_one() -> None:
    facts = ModelFacts("m", "f1", (5, 5, 5, 7, 5), 3, 4, 2, 1, cuts=(1, 4))
    assert ModelFacts.from_wire(facts.to_wire()) == facts
    assert facts.to_wire()["layers"] == [[5, 3], [7, 1], [5, 1]]
    for wrong in ({"layers": [[5, 0]]}, {"layers": [[5, 5000]]}, {"layers": []}, {"cuts": [0]}, {"shared": 9}):
        with pytest.raises(InvalidInputError):
            ModelFacts.from_wire(facts.to_wire() | wrong)


def test_a_thousand_nodes_are_placed_in_a_moment() -> None:
    draw = random.Random(0)
    facts = ModelFacts("m", "f1", (230_000_000,) * 128, 600_000_000, 600_000_000, room=8_000_000)
    mesh = [Machine(f"n{i}", draw.randrange(8, 80) << 30, 2, draw.uniform(0.1, 3), 0.5) for i in range(1000)]
    took = []
    for _ in range(3):
        began = time.process_time()
        place(mesh, facts)
        took.append(time.process_time() - began)
    assert min(took) < 0.3  # about 0.06 s on an idle core; `python -m benchmarks.placement` measures


def test_packed_weights_count_as_what_they_take_and_the_room_for_sessions_as_ever() -> None:
    facts = ModelFacts("m", "f" * 64, (1000,) * 10, embedding=500, head=500, shared=500, room=100)
    assert facts.width("bfloat16") == 2
    assert facts.width("float32") == 4
    packed, eight = facts.width("bfloat16+int4"), facts.width("bfloat16+int8")
    assert packed == pytest.approx((0.625 * 10_000 + 2 * 1000 + 1.125 * 500) / 11_500)
    assert packed < eight < 2
    machine, wide = (Machine(name, 2600, width, 1.0) for name, width in (("packed", packed), ("wide", 2)))
    assert machine.fits(facts, 1, 4)
    assert not wide.fits(facts, 1, 3)
    assert machine.furthest(facts, 1, inf) == 4
    assert wide.furthest(facts, 1, inf) == 2
