"""How a model is cut over the nodes of one route, and which cuts are worth a check. Pure; knows no nodes.

A hop runs to the end of what its shard holds, so where two shards overlap the later one begins inside itself:

    layers   0 1 2 3 4 5 6 7
    shards   [0 1 2 3 4]              runs 0-4
                   [3 4 5 6 7]        runs 5-7: effective start 5
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from meshnet_core.errors import InvalidInputError
from meshnet_core.layer_range import LayerRange


@dataclass(frozen=True, slots=True)
class Split:
    """The layers held by each shard of a route, in order.

    Attributes:
        held: at least one range; the first begins at layer 0, and each later one holds the layer that the one before it
            ends at.

    Raises:
        InvalidInputError: ranges that make no route.
    """

    held: tuple[LayerRange, ...]

    def __post_init__(self) -> None:
        if not self.held or self.held[0].start != 0:
            raise InvalidInputError(f"split {self} does not begin at layer 0")
        for before, after in pairwise(self.held):
            if before.stop not in after:
                raise InvalidInputError(
                    f"split {self} makes no route: {before} must be followed by a range with layer {before.stop}"
                )

    @classmethod
    def parse(cls, text: str) -> Split:
        """Read ``0-14,15-29``."""
        return cls(LayerRange.parse_all(text))

    @classmethod
    def at(cls, num_layers: int, *cuts: int) -> Split:
        """Shards without overlap that begin at 0 and at each of ``cuts``."""
        edges = (0, *cuts, num_layers)
        return cls(tuple(LayerRange(start, stop) for start, stop in pairwise(edges)))

    @property
    def starts(self) -> tuple[int, ...]:
        """Effective start of each hop, an absolute layer index."""
        return (0, *(layers.stop for layers in self.held[:-1]))

    @property
    def num_layers(self) -> int:
        """How many layers the route runs."""
        return self.held[-1].stop

    def __str__(self) -> str:
        """The form that :meth:`parse` reads."""
        return ",".join(map(str, self.held))


def parse_splits(text: str, num_layers: int) -> tuple[Split, ...]:
    """Read ``all``, ``sample``, or splits with a bar between them, ``0-14,15-29|0-19,10-29``.

    Raises:
        InvalidInputError: on anything else, or splits that do not end at the model's last layer.
    """
    if text in {"all", "sample"}:
        return every_split(num_layers) if text == "all" else sample_splits(num_layers)
    splits = tuple(Split.parse(part) for part in text.split("|"))
    for split in splits:
        if split.num_layers != num_layers:
            raise InvalidInputError(
                f"split {split} ends at layer {split.num_layers - 1}; the model's last is {num_layers - 1}"
            )
    return tuple(dict.fromkeys(splits))


def sample_splits(num_layers: int) -> tuple[Split, ...]:
    """A sample of every kind: halves, one layer and the rest, the rest and one layer, thirds, an overlap."""
    if num_layers == 1:
        return (Split.at(1),)
    cuts = (num_layers // 2, 1, num_layers - 1)
    return tuple(dict.fromkeys([*(Split.at(num_layers, cut) for cut in cuts), *_beyond_two(num_layers)]))


def every_split(num_layers: int) -> tuple[Split, ...]:
    """Every cut in two, thirds, and an overlap."""
    if num_layers == 1:
        return (Split.at(1),)
    return (*(Split.at(num_layers, cut) for cut in range(1, num_layers)), *_beyond_two(num_layers))


def _beyond_two(num_layers: int) -> list[Split]:
    middle = num_layers // 2
    if num_layers == 2:
        return [Split((LayerRange(0, 1), LayerRange(0, 2)))]
    overlap = Split((LayerRange(0, middle + 1), LayerRange(middle - 1, num_layers)))
    return [Split.at(num_layers, num_layers // 3, 2 * num_layers // 3), overlap]
