"""How `meshnet up` divides a model's layers among the nodes it starts. Pure; knows neither processes nor models."""

from __future__ import annotations

from meshnet_core.errors import InvalidInputError
from meshnet_core.layer_range import LayerRange


def even_split(num_layers: int, nodes: int) -> tuple[LayerRange, ...]:
    """``num_layers`` in ``nodes`` ranges whose lengths differ by one at most, the longer ones first.

    Raises:
        InvalidInputError: if there are more nodes than layers, or none.
    """
    if not 1 <= nodes <= num_layers:
        raise InvalidInputError(f"a model of {num_layers} layers can be cut into 1 to {num_layers} nodes, not {nodes}")
    each, left = divmod(num_layers, nodes)
    ranges, start = [], 0
    for index in range(nodes):
        stop = start + each + (1 if index < left else 0)
        ranges.append(LayerRange(start, stop))
        start = stop
    return tuple(ranges)


def parse_splits(text: str) -> tuple[LayerRange, ...]:
    """Read ``0-14,15-29``; ranges may overlap.

    Raises:
        InvalidInputError: on anything that is not a range.
    """
    return tuple(LayerRange.parse(part) for part in text.split(","))


def check_cover(splits: tuple[LayerRange, ...], num_layers: int) -> None:
    """Refuse splits that leave a layer out or name one that the model lacks.

    Raises:
        InvalidInputError: naming the layers.
    """
    for layers in splits:
        if layers.stop > num_layers:
            raise InvalidInputError(f"--splits {layers} reaches beyond the model's layers 0-{num_layers - 1}")
    missing = [layer for layer in range(num_layers) if not any(layer in layers for layers in splits)]
    if missing:
        raise InvalidInputError(
            f"--splits leave out layers {_shown(missing)} of 0-{num_layers - 1}; "
            "the ranges may overlap, but must cover all"
        )


def _shown(layers: list[int]) -> str:
    """``[3, 4, 5, 9]`` as ``3-5, 9``."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
