"""Which machine holds which layers: a cover whose slowest part is fastest, then redundancy. Pure.

Decides from what it is given, and measures and moves nothing; `replan` decides what to change of what is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from meshnet_core.layer_range import LayerRange
from meshnet_tracker.cover import Cover, best_cover, slowest_ms
from meshnet_tracker.redundancy import place_spares
from meshnet_tracker.standing import gaps_of, holders_of

if TYPE_CHECKING:
    from meshnet_core.model_facts import ModelFacts
    from meshnet_tracker.machine import Machine

Ranges = dict[str, LayerRange]


@dataclass(frozen=True, slots=True)
class Placement:
    """Who is to hold what.

    Attributes:
        ranges: by machine; fixed ones hold what they held.
        cover: the parts of a decode step; None while layers are missing.
        slowest_ms: of them; infinite while layers are missing.
        missing: layers that no machine holds.
        too_small: machines that cannot hold any part of the model.
    """

    ranges: Ranges
    cover: Cover | None
    slowest_ms: float
    missing: tuple[LayerRange, ...]
    too_small: tuple[str, ...]


def place(machines: Sequence[Machine], facts: ModelFacts) -> Placement:
    """Place all machines but the fixed ones anew; what they hold now only decides between equal plans.

    No machine gets more than its memory. Where the model fits at all, it is covered, and the slowest part of the cover
    is within 5 % of the fastest that there could be for a few machines, or for many if their layers are alike (see
    `cover`); where it does not fit, as many layers as one machine after the other can hold are covered, and the rest is
    told. Redundancy comes after the cover, from machines that it does not need. Deterministic, whatever the order of
    ``machines``.
    """
    machines = in_order(machines)
    cover = best_cover(machines, facts)
    ranges = {m.name: m.held for m in machines if m.fixed and m.held is not None}
    ranges |= ranges_of(cover) if cover is not None else as_many_as_fit(machines, facts)
    return completed(machines, ranges, facts, cover)


def in_order(machines: Sequence[Machine]) -> list[Machine]:
    return sorted(machines, key=lambda machine: machine.name)


def ranges_of(cover: Cover) -> Ranges:
    """What the machines of a cover are to hold: of the fixed ones, what they held."""
    return {part.machine.name: held(part.machine, part.layers) for part in cover}


def held(machine: Machine, layers: LayerRange) -> LayerRange:
    return machine.held if machine.fixed and machine.held is not None else layers


def completed(machines: Sequence[Machine], ranges: Ranges, facts: ModelFacts, cover: Cover | None) -> Placement:
    """With a range for each machine that has none in ``ranges``: redundancy."""
    standing = [replace(machine, held=ranges.get(machine.name)) for machine in machines if machine.name in ranges]
    spares = [machine for machine in machines if machine.name not in ranges]
    holders = holders_of(standing, facts.num_layers)
    more, too_small = place_spares(spares, holders, facts)
    everybody = [*standing, *(replace(m, held=more[m.name]) for m in spares if m.name in more)]
    return Placement(
        ranges=dict(sorted({**ranges, **more}.items())),
        cover=cover,
        slowest_ms=inf if cover is None else slowest_ms(cover, facts),
        missing=tuple(gaps_of(everybody, facts.num_layers)),
        too_small=tuple(too_small),
    )


def as_many_as_fit(machines: Sequence[Machine], facts: ModelFacts) -> Ranges:
    """Ranges for free machines in the gaps that the fixed ones leave, from layer 0 up, as long as there are machines.

    What is left of a gap goes to the machine that is fastest with it, of those that can hold it; where none can, to the
    largest.
    """
    standing = [machine for machine in machines if machine.held is not None and machine.fixed]
    free = sorted((m for m in machines if not m.fixed), key=lambda m: (-(m.memory // m.width), m.name))
    ranges: Ranges = {}
    for gap in gaps_of(standing, facts.num_layers):
        at = gap.start
        for boundary in facts.boundaries:
            if boundary < at or boundary >= gap.stop:
                continue
            found = _best_for(free, boundary, gap.stop, facts)
            if found is not None:
                machine, at = found
                free.remove(machine)
                ranges[machine.name] = LayerRange(boundary, at)
    return ranges


def _best_for(free: list[Machine], start: int, stop: int, facts: ModelFacts) -> tuple[Machine, int] | None:
    """A machine, and how far it goes."""
    if able := [m for m in free if m.fits(facts, start, stop)]:
        return min(able, key=lambda m: m.time(facts, start, stop)), stop
    reaches = ((m, m.furthest(facts, start, inf)) for m in free)
    return next(((m, at) for m, at in reaches if at > start), None)
