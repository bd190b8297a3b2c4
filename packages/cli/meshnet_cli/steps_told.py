"""What decode steps were at each hop of an answer: of what the answer's report and the gateway's status tell. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

from meshnet_core.layer_range import LayerRange


class Steps(enum.StrEnum):
    """How the layers of a step are run, see `docs/compiled-steps.md`."""

    PLAIN = "plain"
    NATIVE = "native"
    COMPILED = "compiled"


_OF_STATES = {"native": Steps.NATIVE, "ready": Steps.COMPILED}  # of a node's `compile`; any other state is plain yet


def steps_told(report: dict[str, Any], model: str, status: dict[str, Any]) -> list[Steps | None]:
    """Of each hop of the report's route; None where nobody tells.

    Args:
        report: the ``meshnet`` object of an answer.
        model: name that it is served under.
        status: as `GET /v1/meshnet/status` answers, soon after it.
    """
    hops = report.get("route", ())
    if report.get("recovery") == "exact":  # whose steps go round both
        return [Steps.PLAIN for _ in hops]
    nodes = {node["node"]: node for node in status.get("nodes", ())}
    return [_of_hop(LayerRange.parse(hop["layers"]), model, nodes.get(hop["node"], {})) for hop in hops]


def _of_hop(layers: LayerRange, model: str, node: dict[str, Any]) -> Steps | None:
    told = node.get("compile")
    if not isinstance(told, dict):  # it did not answer, or its gateway passes none on
        return None
    states = (told.get(name, {}) for name in _shards(layers, model, node))
    known = (_OF_STATES.get(str(state.get("state")), Steps.PLAIN) for state in states if isinstance(state, dict))
    return next(known, None)


def _shards(layers: LayerRange, model: str, node: dict[str, Any]) -> Iterator[str]:
    """What the node calls its loaded shards that a hop over these layers may have run on."""
    for shard in node.get("layers", ()):
        held = LayerRange.parse(shard["layers"])
        if shard["model"] == model and held.stop == layers.stop and held.start <= layers.start and shard["loaded"]:
            yield f"layers {held} of {model}"
