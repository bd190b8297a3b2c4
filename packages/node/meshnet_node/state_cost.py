"""What a session's state takes in memory, layer by layer, as measured on the cache object that holds it.

Measured rather than computed, so that it is right for whatever a family's cache holds. Knows no sessions and no frames.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from meshnet_core.frames import MAX_CHUNK
from meshnet_core.layer_range import LayerRange
from meshnet_node.growing_cache import rows_for
from meshnet_node.layer_view import LayerView
from meshnet_node.session_state import tensors_of_each_layer


@dataclass(frozen=True, slots=True)
class LayerCost:
    """State of one layer for one session, in bytes: a fixed part, and a part for each position up to ``window``."""

    fixed: int
    per_position: int
    window: int | None

    def after(self, positions: int) -> int:
        """An upper bound: until the next frame a window is a view of all that the last one brought."""
        held = positions if self.window is None else min(positions, self.window + MAX_CHUNK)
        return self.fixed + self.per_position * rows_for(held)


@torch.inference_mode()
def measured_costs(view: LayerView, inputs: torch.Tensor) -> list[LayerCost]:
    """Run two single positions and look at what the cache object then holds, layer by layer; it warms the shard up.

    Args:
        view: of all layers of a shard.
        inputs: one position, as its frames begin.
    """
    cache = view.new_cache()
    held = []
    for position in range(2):
        # The head too, so that what cannot run is found out before it serves.
        view.forward(inputs, position=position, cache=cache, sample=int(view.is_last), cancelled=lambda: False)
        held.append([sum(t.nbytes for t in tensors) for tensors in tensors_of_each_layer(cache)])
    costs = []
    for layer, first, second in zip(cache.layers, *held, strict=True):
        window = layer.sliding_window if getattr(layer, "is_sliding", False) else None
        costs.append(LayerCost(fixed=2 * first - second, per_position=second - first, window=window))
    return costs


class StateCosts:
    """The costs of a shard's layers, added up from an effective start to the end.

    Args:
        layers: the shard's range.
        costs: of each of them.
    """

    def __init__(self, layers: LayerRange, costs: Sequence[LayerCost]) -> None:
        self._layers, self._costs = layers, costs
        self._kinds: dict[int, Counter[LayerCost]] = {}  # by start

    def bytes_per_position(self, start: int) -> int:
        """By which state of layers ``start`` to the end grows with each position, without end."""
        return sum(cost.per_position * layers for cost, layers in self._from(start) if cost.window is None)

    def bytes_after(self, start: int, positions: int) -> int:
        """Upper bound of that state after ``positions`` positions, taken in by frames of any size."""
        return sum(cost.after(positions) * layers for cost, layers in self._from(start))

    def _from(self, start: int) -> Iterable[tuple[LayerCost, int]]:
        """Costs, and how many layers have each: most have the same."""
        if start not in self._kinds:
            self._kinds[start] = Counter(self._costs[self._layers.starting_at(start).start - self._layers.start :])
        return self._kinds[start].items()
