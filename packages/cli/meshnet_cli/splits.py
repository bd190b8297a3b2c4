"""How `meshnet up` divides a model's layers among the nodes it starts. Pure; knows neither processes nor models."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

from meshnet_core.errors import InvalidInputError
from meshnet_core.layer_range import LayerRange


def even_split(num_layers: int, nodes: int, cuts: Collection[int] | None = None) -> tuple[LayerRange, ...]:
    """``num_layers`` in ``nodes`` ranges of lengths as equal as can be, the longer ones first.

    Args:
        num_layers: of the model.
        nodes: how many ranges.
        cuts: where the model may be cut, each the first layer after the cut; None where it may be cut anywhere.

    Raises:
        InvalidInputError: if there are more nodes than the model can be cut into, or none.
    """
    most = num_layers if cuts is None else len(cuts) + 1
    if not 1 <= nodes <= most:
        if most == 1 < num_layers:
            raise InvalidInputError(f"this model cannot be cut, so one node must hold it, not {nodes}")
        kind = f"a model of {num_layers} layers" if most == num_layers else "this model"
        raise InvalidInputError(f"{kind} can be cut into 1 to {most} nodes, not {nodes}")
    each, left = divmod(num_layers, nodes)
    starts = [index * each + min(index, left) for index in range(nodes)]
    if cuts is not None and not set(starts[1:]) <= set(cuts):
        starts = _nearest_starts(num_layers, nodes, sorted(cuts))
    return tuple(LayerRange(start, stop) for start, stop in pairwise([*starts, num_layers]))


def _nearest_starts(num_layers: int, nodes: int, cuts: list[int]) -> list[int]:
    """Where each range begins, so that the sum of the squares of their lengths is least; of equals, the longer first.

    A range costs the same whatever comes before it, so the best beginnings of all shorter splits are enough to go on
    from (dynamic programming over the cuts).
    """
    best = {0: (0, [0])}  # beginning of the newest range -> cost of all before it, and where they begin
    for _ in range(nodes - 1):
        best = {
            cut: min(
                ((cost + (cut - start) ** 2, [*starts, cut]) for start, (cost, starts) in best.items() if start < cut),
                key=lambda found: (found[0], [-start for start in found[1]]),
            )
            for cut in cuts
            if cut > min(best)
        }
    ends = ((cost + (num_layers - start) ** 2, starts) for start, (cost, starts) in best.items())
    return min(ends, key=lambda found: (found[0], [-start for start in found[1]]))[1]


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
