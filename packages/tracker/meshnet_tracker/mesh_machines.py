"""The nodes of a snapshot as machines to place on: those that leave their layers to the tracker, and those that hold
what a person chose. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, log
from typing import TYPE_CHECKING

from meshnet_core.dtypes import dtype_bytes
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
    machines = []
    for node in snapshot.nodes:
        shards = [shard for shard in node.shards if shard.fingerprint == facts.fingerprint]
        if node.draining:
            continue
        if node.placement is not None and node.placement.facts.fingerprint == facts.fingerprint:
            place = node.placement
            machines.append(
                Machine(
                    node.node_id,
                    place.memory,
                    dtype_bytes(place.dtype),
                    _layer_ms(node, shards, place.dtype, facts),
                    HOP_MS,
                    held=(promised or {}).get(node.node_id, place.target),
                )
            )
        elif node.placement is None:
            machines += [
                Machine(
                    node.node_id if not number else f"{node.node_id}/{number}",
                    0,
                    dtype_bytes(shard.dtype),
                    _layer_ms(node, [shard], shard.dtype, facts),
                    HOP_MS,
                    held=shard.layers,
                    fixed=True,
                )
                for number, shard in enumerate(shards)
            ]
    return machines


def _layer_ms(node: NodeInfo, shards: list[ShardInfo], dtype: str, facts: ModelFacts) -> float:
    """What was measured, the head's time taken off, else what such a device takes presumably."""
    measured = [shard for shard in shards if shard.decode_ms]
    if not measured:
        return layer_ms(node.device, dtype_bytes(dtype), facts)
    shard = measured[0]
    layers = len(shard.layers)
    head = facts.head_layers if shard.layers.stop == facts.num_layers else 0.0
    ms = (shard.decode_ms or 0.0) * layers / (layers + head)
    return exp(round(log(max(ms, 1e-6)) / _STEP) * _STEP)
