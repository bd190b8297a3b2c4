"""What to change when machines come, go or turn out slow: as little as does. Pure.

Several ways to go on are compared, and the one that moves the fewest machines is taken of those that leave the fewest
layers uncovered and whose slowest part is not much slower than the best one's. Staying is one of them, with a wider
margin (`STAY`) than the others (`MOVE`): so what was just planned is kept when it is looked at again, and a little more
speed is no reason to load gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from meshnet_core.layer_range import LayerRange
from meshnet_tracker.cover import best_cover, cover_within, slowest_ms
from meshnet_tracker.placement import Placement, Ranges, as_many_as_fit, completed, held, in_order, ranges_of
from meshnet_tracker.standing import gaps_of, holders_of, standing_cover

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshnet_core.model_facts import ModelFacts
    from meshnet_tracker.machine import Machine

STAY = 1.3  # a plan is kept while its slowest part is at most so much slower than the best one's
MOVE = 1.2  # of plans that move machines, those at most so much slower than the best count as equal


def replan(machines: Sequence[Machine], facts: ModelFacts, *, for_speed: bool = True) -> Placement:
    """What each machine is to hold from now on, given what it holds; newcomers hold nothing yet.

    Feeding the result back changes nothing. Machines whose memory is too small for what they hold are newcomers.

    Args:
        machines: all of the mesh, in any order.
        facts: of the model.
        for_speed: whether machines may be moved where no layer is missing.
    """
    machines = [_checked(machine, facts) for machine in in_order(machines)]
    now = {m.name: m.held for m in machines if m.held is not None}
    judged = []
    for number, ranges in enumerate(_ways(machines, now, facts, for_speed=for_speed)):
        standing = [replace(m, held=ranges[m.name]) for m in machines if m.name in ranges]
        missing = sum(map(len, gaps_of(standing, facts.num_layers)))
        cover = standing_cover(standing, facts) if not missing else None
        slowest = inf if cover is None else slowest_ms(cover, facts)
        moves = sum(ranges.get(name) != layers for name, layers in now.items())
        judged.append((missing, slowest, moves, number, ranges, cover))
    fewest = min(way[0] for way in judged)
    able = [way for way in judged if way[0] == fewest]
    best = min(way[1] for way in able)
    chosen = [way for way in able if way[1] <= best * (MOVE if way[2] else STAY)]
    _, _, _, _, ranges, cover = min(chosen, key=lambda way: way[2:4] if way[2] else (0, way[1], way[3]))
    return completed(machines, ranges, facts, cover)


def _checked(machine: Machine, facts: ModelFacts) -> Machine:
    layers = machine.held
    if layers is None or machine.fixed:
        return machine
    known = {layers.start, layers.stop} <= set(facts.boundaries)
    return machine if known and machine.fits(facts, layers.start, layers.stop) else replace(machine, held=None)


def _ways(machines: list[Machine], now: Ranges, facts: ModelFacts, *, for_speed: bool) -> Iterator[Ranges]:
    yield now
    gaps = gaps_of(machines, facts.num_layers)
    if not gaps and not for_speed:
        return
    fixed = {m.name: m.held for m in machines if m.fixed and m.held is not None}
    anew = best_cover(machines, facts)
    if gaps:
        limit_ms = inf if anew is None else slowest_ms(anew, facts) * MOVE
        newcomers = {machine.name for machine in machines if machine.held is None}
        for free in (newcomers, newcomers | _spare(machines, facts)):
            given = [replace(m, fixed=m.name not in free, held=None if m.name in free else m.held) for m in machines]
            yield now | as_many_as_fit(given, facts)
            if free and (filled := cover_within(given, facts, limit_ms)) is not None:
                yield now | ranges_of(filled)
        if (widened := _widened(machines, gaps, facts)) is not None:
            yield widened
    if anew is not None:
        yield fixed | ranges_of(anew)
        yield now | ranges_of(anew)  # those that the cover does not need may as well stay where they are
    elif gaps:
        yield fixed | as_many_as_fit(machines, facts)


def _spare(machines: list[Machine], facts: ModelFacts) -> set[str]:
    """Machines without whom no layer more would be missing, found one after the other, the smallest first."""
    holders = holders_of(machines, facts.num_layers)
    spare = set()
    for machine in sorted(machines, key=lambda m: (len(m.held) if m.held else 0, m.name)):
        layers = machine.held
        if layers is not None and not machine.fixed and min(holders[layers.start : layers.stop]) > 1:
            spare.add(machine.name)
            for layer in range(layers.start, layers.stop):
                holders[layer] -= 1
    return spare


def _widened(machines: list[Machine], gaps: list[LayerRange], facts: ModelFacts) -> Ranges | None:
    """Each gap taken over by one machine beside it, as well as what it holds; None if some gap has none that can.

    Of those that can, the one that is fastest with it.
    """
    now = {m.name: m for m in machines}
    for gap in gaps:
        found = []
        for machine in now.values():
            layers = machine.held
            if layers is None or machine.fixed or not (layers.stop == gap.start or layers.start == gap.stop):
                continue
            start, stop = min(layers.start, gap.start), max(layers.stop, gap.stop)
            if machine.fits(facts, start, stop):
                found.append((machine.time(facts, start, stop), machine.name, LayerRange(start, stop)))
        if not found:
            return None
        _, name, layers = min(found)
        now[name] = replace(now[name], held=layers)
    return {name: held(m, m.held) for name, m in now.items() if m.held is not None}
