"""Figures of nodes as a table, and what was dropped and missed by reason. Pure; from the nodes of a status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshnet_gateway.dashboard.mesh_picture import MachineState, state_of


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """What one node holds.

    Attributes:
        state_bytes, budget_bytes: of session state; the latter None where the node does not tell it.
        share: of the budget that is in use, 0 to 1; None where it is not known.
    """

    name: str
    state: MachineState
    sessions: int
    queued: int
    state_bytes: int
    budget_bytes: int | None
    share: float | None


def node_figures(nodes: Iterable[Mapping[str, Any]]) -> tuple[NodeFigures, ...]:
    """Of each node that is not gone."""
    return tuple(_figures(node) for node in nodes if not node.get("gone"))


def by_reason(nodes: Sequence[Mapping[str, Any]], what: str) -> dict[str, int]:
    """Counts of ``dropped`` or ``misses`` over all nodes, most frequent first.

    Reasons that never were are left out, and so is what answers that ended left behind in good order.
    """
    counts: Counter[str] = Counter()
    for node in nodes:
        counts.update(node.get(what) or {})
    if what == "dropped":
        counts.pop("released", None)
    return {reason: count for reason, count in counts.most_common() if count}


def _figures(node: Mapping[str, Any]) -> NodeFigures:
    held, budget = int(node.get("state_bytes") or 0), node.get("budget_bytes")
    return NodeFigures(
        name=node["node"],
        state=state_of(node),
        sessions=int(node.get("sessions") or 0),
        queued=int(node.get("queued") or 0),
        state_bytes=held,
        budget_bytes=budget,
        share=min(1.0, held / budget) if budget else None,
    )
