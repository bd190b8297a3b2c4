"""Nodes as tests announce them."""

from __future__ import annotations

from typing import Any

from meshnet_core.layer_range import LayerRange
from meshnet_core.membership import NodeInfo, ShardInfo, Snapshot


def shard(layers: str, **changes: Any) -> ShardInfo:
    """A shard of a model "m" with 30 layers, measured at 1 ms per layer; ``layers`` as people type them."""
    fields: dict[str, Any] = {
        "model": "m",
        "fingerprint": "f1",
        "layers": LayerRange.parse(layers),
        "num_layers": 30,
        "hidden_size": 8,
        "max_positions": 2048,
        "dtype": "float32",
        "decode_ms": 1.0,
    }
    return ShardInfo(**(fields | changes))


def node(node_id: str, *shards: ShardInfo | str, **changes: Any) -> NodeInfo:
    """An idle node; shards may be given by their layers alone."""
    fields: dict[str, Any] = {
        "url": f"http://{node_id}:7410",
        "boot": f"b-{node_id}",
        "version": "0.1.0",
        "device": "cpu",
        "shards": tuple(shard(item) if isinstance(item, str) else item for item in shards),
    }
    return NodeInfo(node_id=node_id, **(fields | changes))


def snapshot(*nodes: NodeInfo) -> Snapshot:
    return Snapshot(nodes)
