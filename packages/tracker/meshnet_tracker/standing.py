"""What machines that hold what they hold make together: the best cover there is, and what is missing. Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from meshnet_core.layer_range import LayerRange
from meshnet_tracker.cover import Cover, Part

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshnet_core.model_facts import ModelFacts
    from meshnet_tracker.machine import Machine


def holders_of(machines: Iterable[Machine], num_layers: int) -> list[int]:
    """How many machines hold each layer."""
    steps = [0] * (num_layers + 1)
    for machine in machines:
        if machine.held is not None:
            steps[machine.held.start] += 1
            steps[machine.held.stop] -= 1
    counts, count = [], 0
    for step in steps[:-1]:
        count += step
        counts.append(count)
    return counts


def gaps_of(machines: Iterable[Machine], num_layers: int) -> list[LayerRange]:
    """The layers that nobody holds, in order."""
    gaps: list[LayerRange] = []
    for layer, count in enumerate(holders_of(machines, num_layers)):
        if count:
            continue
        if gaps and gaps[-1].stop == layer:
            gaps[-1] = LayerRange(gaps[-1].start, layer + 1)
        else:
            gaps.append(LayerRange(layer, layer + 1))
    return gaps


def standing_cover(machines: Iterable[Machine], facts: ModelFacts) -> Cover | None:
    """The cover by what is held whose slowest part is fastest, then of fewest parts; None where layers are missing.

    A route enters a shard at any layer of it and runs to its end, so this is a path over the shards' ends.
    """
    ending: defaultdict[int, list[Machine]] = defaultdict(list)
    for machine in sorted(machines, key=lambda m: (m.layer_ms, m.hop_ms, m.name)):
        if machine.held is not None and not any(_beats(m, machine) for m in ending[machine.held.stop]):
            ending[machine.held.stop].append(machine)
    best: dict[int, tuple[float, int, Part | None]] = {0: (0.0, 0, None)}
    for stop in sorted(ending):
        for machine in ending[stop]:
            for start, (slowest, hops, _) in list(best.items()):
                if machine.held is not None and start in machine.held:
                    rank = (max(slowest, machine.time(facts, start, stop)), hops + 1)
                    if stop not in best or rank < best[stop][:2]:
                        best[stop] = (*rank, Part(machine, start, stop))
    parts: Cover = []
    at = facts.num_layers
    while at in best and (part := best[at][2]) is not None:
        parts.append(part)
        at = part.start
    return parts[::-1] if parts else None


def _beats(one: Machine, other: Machine) -> bool:
    """Whether ``one``, no slower and with the same end, can stand in for ``other`` wherever it is entered."""
    if one.held is None or other.held is None:
        return False
    return one.held.start <= other.held.start and one.layer_ms <= other.layer_ms and one.hop_ms <= other.hop_ms
