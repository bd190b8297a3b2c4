"""Where machines that no cover needs help most: with the layers whose holders are fewest. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshnet_core.layer_range import LayerRange

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from meshnet_core.model_facts import ModelFacts
    from meshnet_tracker.machine import Machine

# How much the next death among the holders of a layer hurts, by their number: one, and nobody can be answered; of two,
# one is left. The more there are, the less likely it is that all go before placement has made up for the first.
_HURTS = np.array([1.0, *(1.0 / count**3 for count in range(1, 64))])


def place_spares(
    spares: Iterable[Machine], holders: list[int], facts: ModelFacts
) -> tuple[dict[str, LayerRange], list[str]]:
    """A range for each spare machine, one after the other: what hurts most of what it can hold.

    Args:
        spares: in the order in which they are placed.
        holders: how many machines hold each layer already.

    Returns:
        Ranges by machine, and the machines that can hold no part at all.
    """
    placed: dict[str, LayerRange] = {}
    too_small = []
    stretches = _Stretches(facts)
    held = np.array(holders)
    for machine in spares:
        layers = stretches.worst(machine, held)
        if layers is None:
            too_small.append(machine.name)
        else:
            placed[machine.name] = layers
            held[layers.start : layers.stop] += 1
    return placed, too_small


class _Stretches:
    """The longest ranges that a machine can hold, one from each boundary."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts
        self._boundaries = np.array(facts.boundaries)
        self._sums = np.array(facts.sums, np.float64)[self._boundaries]
        self._begin = self._sums[:-1].copy()
        self._begin[0] -= facts.embedding

    def worst(self, machine: Machine, holders: NDArray[np.int64]) -> LayerRange | None:
        """The one whose layers hurt most together; of equals the lowest. None where it can hold none."""
        facts, last = self._facts, len(self._boundaries) - 1
        if machine.fits(facts, 0, facts.num_layers):
            return LayerRange(0, facts.num_layers)
        elements = int(machine.memory // machine.width)
        stops = np.searchsorted(self._sums, self._begin + elements, side="right") - 1
        np.minimum(stops, last - 1, out=stops)  # the last boundary is the model's end, which brings the head
        to_end = int(np.searchsorted(self._sums, self._sums[last] - (elements - facts.head), side="left"))
        stops[max(1, to_end) :] = last
        hurts = np.concatenate(([0.0], np.cumsum(_HURTS[np.minimum(holders, len(_HURTS) - 1)])))[self._boundaries]
        gains = hurts[np.maximum(stops, np.arange(last))] - hurts[:last]
        at = int(np.argmax(gains > gains.max() * (1 - 1e-9)))
        if stops[at] <= at:
            return None
        return LayerRange(int(self._boundaries[at]), int(self._boundaries[stops[at]]))
