"""The mesh as a picture: machines, their layers on an axis, gaps, overlaps and the routes of live generations. Pure.

Knows no browser. Made from the JSON of `GET /v1/meshnet/status`, with what `known_machines` remembers of the gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from meshnet_core.layer_range import LayerRange


class MachineState(StrEnum):
    """How it stands with a machine."""

    ANSWERS = "answers"
    DRAINING = "draining"  # about to leave: takes no new sessions
    SILENT = "silent"  # the tracker still lists it, but it does not answer
    GONE = "gone"  # no longer listed


PRESENT = frozenset({MachineState.ANSWERS, MachineState.DRAINING})


@dataclass(frozen=True, slots=True)
class Bar:
    """Layers that a machine holds of one model."""

    layers: LayerRange
    dtype: str
    loaded: bool


@dataclass(frozen=True, slots=True)
class MachineRow:
    """One machine in a picture of a model; ``lit``: its layers on the routes of live generations, while it is there."""

    name: str
    device: str
    state: MachineState
    bars: tuple[Bar, ...]
    lit: tuple[LayerRange, ...] = ()


@dataclass(frozen=True, slots=True)
class LiveRoute:
    """A generation that runs: the names of its hops in order, and how far it is.

    Attributes:
        tokens_per_s: of its newest tokens; None before there are two.
    """

    session: str
    hops: tuple[str, ...]
    prompt_tokens: int
    tokens: int
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class ModelPicture:
    """One model over the machines that hold some of it.

    Attributes:
        gaps: layers that no machine that answers holds, in order.
        overlaps: layers that more than one of them holds, in order.
        expected_tokens_per_s: on the cheapest route; None where there is none.
    """

    name: str
    num_layers: int
    rows: tuple[MachineRow, ...]
    gaps: tuple[LayerRange, ...]
    overlaps: tuple[LayerRange, ...]
    live: tuple[LiveRoute, ...]
    expected_tokens_per_s: float | None


def pictures(
    models: Iterable[Mapping[str, Any]], nodes: Sequence[Mapping[str, Any]], running: Sequence[Mapping[str, Any]]
) -> tuple[ModelPicture, ...]:
    """A picture of each model, by name.

    Args:
        models, nodes: of the status. A node with ``"gone": true`` is one that was known before.
        running: ``gateway.running`` of the status.
    """
    found: dict[str, ModelPicture] = {}
    for model in models:
        if model["name"] not in found:  # of several fingerprints under one name, the first that is whole comes first
            found[model["name"]] = _picture(model, nodes, [one for one in running if one["model"] == model["name"]])
    return tuple(found[name] for name in sorted(found))


def state_of(node: Mapping[str, Any]) -> MachineState:
    """How it stands with a node of the status."""
    if node.get("gone"):
        return MachineState.GONE
    if not node["answers"]:
        return MachineState.SILENT
    return MachineState.DRAINING if node["draining"] else MachineState.ANSWERS


def _picture(
    model: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]], running: Sequence[Mapping[str, Any]]
) -> ModelPicture:
    rows = tuple(row for node in nodes if (row := _row(model["name"], node, running)).bars)
    present = [row for row in rows if row.state in PRESENT]
    depth = depths([bar.layers for row in present for bar in row.bars], model["num_layers"])
    ms = model.get("expected_ms_per_token")
    gaps = tuple(layers for layers, holders in depth if holders == 0)
    return ModelPicture(
        name=model["name"],
        num_layers=model["num_layers"],
        rows=tuple(sorted(rows, key=lambda row: (row.bars[0].layers, row.name))),
        gaps=gaps,
        overlaps=tuple(layers for layers, holders in depth if holders > 1),
        live=tuple(map(_live, running)),
        expected_tokens_per_s=round(1000 / ms, 1) if ms and not gaps else None,
    )


def _row(model: str, node: Mapping[str, Any], running: Sequence[Mapping[str, Any]]) -> MachineRow:
    bars = sorted(
        (
            Bar(LayerRange.parse(shard["layers"]), shard["dtype"], bool(shard.get("loaded", True)))
            for shard in node["layers"]
            if shard["model"] == model
        ),
        key=lambda bar: bar.layers,
    )
    state, lit = state_of(node), set()
    if state in PRESENT:
        hops = (hop for one in running for hop in one["route"])
        lit = {LayerRange.parse(hop["layers"]) for hop in hops if hop["node"] == node["node"]}
    return MachineRow(node["node"], node["device"], state, tuple(bars), tuple(sorted(lit)))


def _live(running: Mapping[str, Any]) -> LiveRoute:
    return LiveRoute(
        session=str(running["session"]),
        hops=tuple(hop["node"] for hop in running["route"]),
        prompt_tokens=running["prompt_tokens"],
        tokens=running["completion_tokens"],
        tokens_per_s=running["tokens_per_s"],
    )


def depths(held: Sequence[LayerRange], num_layers: int) -> list[tuple[LayerRange, int]]:
    """How many of ``held`` cover each stretch of ``[0, num_layers)``; neighbours with the same kind of depth (none,
    one, several) are one stretch, with the least depth of it."""
    cuts = sorted({0, num_layers, *(cut for one in held for cut in (one.start, one.stop) if cut < num_layers)})
    found: list[tuple[LayerRange, int]] = []
    for start, stop in pairwise(cuts):
        depth = sum(one.start <= start and stop <= one.stop for one in held)
        if found and min(found[-1][1], 2) == min(depth, 2):
            last, least = found.pop()
            found.append((LayerRange(last.start, stop), min(least, depth)))
        else:
            found.append((LayerRange(start, stop), depth))
    return found
