"""The nodes of a snapshot as machines to place on: those that leave their layers to the tracker, and those that hold
what a person chose. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import exp, log
from statistics import median
from typing import TYPE_CHECKING

from meshnet_core.dtypes import weight_width
from meshnet_tracker.machine import Machine
from meshnet_tracker.speed import HOP_MS, layer_ms

if TYPE_CHECKING:
    from meshnet_core.layer_range import LayerRange
    from meshnet_core.membership import NodeInfo, ShardInfo, Snapshot
    from meshnet_core.model_facts import ModelFacts

_STEP = log(1.15)  # of measured times: what moves less than this is the same, or every heartbeat would be another mesh


def machines_of(
    snapshot: Snapshot, facts: ModelFacts, promised: Mapping[str, LayerRange] | None = None
) -> list[Machine]:
    """Machines for one model, by its fingerprint. A node that drains is none; one with several fixed shards is several.

    Args:
        snapshot: the nodes.
        facts: of the model.
        promised: by node, what it was told to hold and has not announced yet.
    """
    nodes = [node for node in snapshot.nodes if not node.draining]
    own = {node.node_id: _of_model(node, facts) for node in nodes}
    speeds = _Speeds([(node, shard) for node in nodes for shard in own[node.node_id]], facts)
    machines = []
    for node in nodes:
        place = node.placement
        if place is not None and place.facts.fingerprint == facts.fingerprint:
            machines.append(
                Machine(
                    node.node_id,
                    place.memory,
                    facts.width(place.dtype),
                    speeds.layer_ms(node.device, place.dtype, own[node.node_id]),
                    HOP_MS,
                    held=(promised or {}).get(node.node_id, place.target),
                )
            )
        elif place is None:
            machines += [
                Machine(
                    node.node_id if not number else f"{node.node_id}/{number}",
                    0,
                    facts.width(shard.dtype),
                    speeds.layer_ms(node.device, shard.dtype, [shard]),
                    HOP_MS,
                    held=shard.layers,
                    fixed=True,
                )
                for number, shard in enumerate(own[node.node_id])
            ]
    return machines


def _of_model(node: NodeInfo, facts: ModelFacts) -> list[ShardInfo]:
    return [shard for shard in node.shards if shard.fingerprint == facts.fingerprint]


class _Speeds:
    """What a layer takes: what was measured; else a guess by the device, put right by what others of the mesh take.

    Measured and guessed times are compared with one another, so a guess that is wrong for all devices of a kind by the
    same factor must not make a newcomer look like the fastest machine of the mesh.
    """

    def __init__(self, shards: Iterable[tuple[NodeInfo, ShardInfo]], facts: ModelFacts) -> None:
        self._facts = facts
        self._off: defaultdict[str, list[float]] = defaultdict(list)
        for node, shard in shards:
            if (ms := self._measured(shard)) is not None:
                self._off[node.device].append(ms / layer_ms(node.device, weight_width(shard.dtype), facts))
        self._off[""] = [ratio for ratios in self._off.values() for ratio in ratios]

    def layer_ms(self, device: str, dtype: str, shards: Iterable[ShardInfo]) -> float:
        """Milliseconds, rounded so that a little more or less is the same."""
        measured = [ms for shard in shards if (ms := self._measured(shard)) is not None]
        if measured:
            return _rounded(measured[0])
        ratios = self._off.get(device) or self._off[""]
        return _rounded(layer_ms(device, weight_width(dtype), self._facts) * (median(ratios) if ratios else 1.0))

    def _measured(self, shard: ShardInfo) -> float | None:
        """Without the time of the head."""
        if not shard.decode_ms:
            return None
        layers = len(shard.layers)
        head = self._facts.head_layers if shard.layers.stop == self._facts.num_layers else 0.0
        return shard.decode_ms * layers / (layers + head)


def _rounded(ms: float) -> float:
    return exp(round(log(max(ms, 1e-6)) / _STEP) * _STEP)
