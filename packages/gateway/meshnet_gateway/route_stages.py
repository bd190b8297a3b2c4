"""A route as the line of stages that chunks of a prefill go through, by what was measured of its nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshnet_core.dtypes import computed_in, dtype_bytes
from meshnet_core.hop_price import DEFAULT_MIB_MS, DEFAULT_PREFILL_SHARE, HOP_MS, decode_ms_of
from meshnet_core.link_info import MIB
from meshnet_core.membership import NodeInfo, ShardInfo, Snapshot
from meshnet_core.route import Hop, Route


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a chunk's way that takes one chunk at a time: a hop, or the link to one. In milliseconds.

    Attributes:
        fixed_ms: that any chunk keeps it busy for.
        position_ms: and each position of it.
        delay_ms: that a chunk is on its way to it, which keeps nobody else waiting.
        depth_ms: that each position of a chunk keeps it busy for each position before that.
    """

    fixed_ms: float
    position_ms: float
    delay_ms: float = 0.0
    depth_ms: float = 0.0

    def busy_ms(self, positions: int, before: int = 0) -> float:
        """How long a chunk with ``before`` positions before it keeps it busy."""
        return self.fixed_ms + positions * (self.position_ms + self.depth_ms * (before + positions / 2))

    def prefill_ms(self, positions: int, chunks: int, before: int = 0) -> float:
        """How long so many chunks keep it busy, however these positions are shared out among them."""
        return self.busy_ms(positions, before) + (chunks - 1) * self.fixed_ms


def stages_of(route: Route, snapshot: Snapshot, entry_ms: Mapping[str, float]) -> tuple[Stage, ...]:
    """The ways and hops of a route in order, as far as ``snapshot`` knows their nodes; () if it does not know one.

    Where a node does not tell what its chunks cost, a decode step is taken for what any chunk costs, since it reads the
    same weights. Packed weights are the exception, since chunks may unpack them first, at a price that no step tells:
    of a route with such a shard nothing is known.

    Args:
        entry_ms: round trips to nodes that were first hops, by node id.
    """
    nodes = {node.node_id: node for node in snapshot.nodes}
    stages: list[Stage] = []
    sender: tuple[NodeInfo, ShardInfo] | None = None
    for hop in route.hops:
        node = nodes.get(hop.node_id)
        shard = None if node is None else _shard_of(node, route, hop)
        busy = None if node is None or shard is None else _busy(node, shard, len(hop.layers))
        if node is None or shard is None or busy is None:
            return ()
        stages.append(Stage(0.0, 0.0, entry_ms.get(hop.node_id, HOP_MS) / 2) if sender is None else _link(*sender, hop))
        stages.append(busy)
        sender = node, shard
    return tuple(stages)


def _busy(node: NodeInfo, shard: ShardInfo, layers: int) -> Stage | None:
    costs = shard.chunk_costs
    if costs is not None:
        fixed_ms, depth_ms = costs.fixed_ms * layers, costs.depth_ms * layers
        return Stage(HOP_MS + fixed_ms, costs.position_ms * layers, depth_ms=depth_ms)
    if shard.dtype != computed_in(shard.dtype):
        return None
    decode_ms = decode_ms_of(node, shard)
    position_ms = decode_ms * DEFAULT_PREFILL_SHARE if shard.prefill_ms is None else shard.prefill_ms
    return Stage(HOP_MS + decode_ms * layers, position_ms * layers)


def _link(node: NodeInfo, shard: ShardInfo, onward: Hop) -> Stage:
    link = next((link for link in node.links if link.node_id == onward.node_id), None)
    mib_ms = DEFAULT_MIB_MS if link is None or link.mib_ms is None else link.mib_ms
    position_bytes = shard.hidden_size * dtype_bytes(shard.dtype)
    return Stage(0.0, mib_ms * position_bytes / MIB, (HOP_MS if link is None else link.rtt_ms) / 2)


def _shard_of(node: NodeInfo, route: Route, hop: Hop) -> ShardInfo | None:
    return next(
        (
            shard
            for shard in node.shards
            if shard.model == route.model
            and shard.fingerprint == route.fingerprint
            and shard.layers.stop == hop.layers.stop
            and hop.layers.start in shard.layers
        ),
        None,
    )
