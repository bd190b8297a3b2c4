"""`meshnet nodes`: one line for each node and shard of a mesh."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from meshnet_cli import options
from meshnet_cli.find_trackers import NO_NODES
from meshnet_cli.mesh_source import Document, asking
from meshnet_cli.status import megabytes

COLUMNS = ("node", "model", "layers", "device", "dtype", "ms per layer", "sessions", "cache", "state")


@asking
def nodes(document: Document, as_json: bool) -> None:
    """List the nodes of a mesh: their layers, device, speed, sessions and memory."""
    found = document["nodes"]
    if as_json:
        print(json.dumps(found, indent=2))
        return
    if not found:
        print(NO_NODES)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*COLUMNS)
    for row in rows(found):
        table.add_row(*row)
    Console(highlight=False, width=None if sys.stdout.isatty() else options.PIPED_WIDTH).print(table)


def rows(found: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """The table's rows, one for each shard, in the order of `COLUMNS`; pure.

    Args:
        found: the ``nodes`` of `GET /v1/meshnet/status`.
    """
    for node in found:
        budget = node.get("budget_bytes")
        cache = megabytes(node.get("state_bytes", 0)) + (f" of {megabytes(budget)}" if budget is not None else "")
        for index, shard in enumerate(node["layers"] or [{}]):
            first = index == 0
            yield (
                node["node"] if first else "",
                shard.get("model", "-"),
                shard.get("layers", "-") + ("" if shard.get("loaded", True) else " (not in memory)"),
                node["device"],
                shard.get("dtype", "-"),
                "not measured" if shard.get("decode_ms") is None else f"{shard['decode_ms']:.3f}",
                str(node.get("sessions", "?")) if first else "",
                cache if first else "",
                _state(node) if first else "",
            )


def _state(node: Mapping[str, Any]) -> str:
    if not node["answers"]:
        return "does not answer"
    return "draining" if node["draining"] else "serving"
