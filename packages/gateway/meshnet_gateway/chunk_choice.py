"""Into how long chunks a prefill is cut, and how many of them are under way at once, by what was measured. Pure.

    hop 1    [ chunk 1 ][ chunk 2 ][ chunk 3 ]
    link               [>]        [>]        [>]
    hop 2                [ chunk 1 ][ chunk 2 ][ chunk 3 ]

Short chunks let the hops work at once sooner; but each chunk costs every hop what does not depend on its length: the
weights are read once for it, whatever it carries. The time of a prefill is that of a flow shop whose jobs are all alike
but for the last one, which may be shorter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from meshnet_core.dtypes import computed_in, dtype_bytes
from meshnet_core.frames import MAX_CHUNK
from meshnet_core.hop_price import DEFAULT_MIB_MS, DEFAULT_PREFILL_SHARE, HOP_MS, decode_ms_of
from meshnet_core.link_info import MIB
from meshnet_core.membership import NodeInfo, ShardInfo, Snapshot
from meshnet_core.route import Hop, Route

CHUNK_STEP = 32  # chunks are multiples of it: matrix products like round numbers, and few lengths mean few roundings
LEAST_IN_FLIGHT = 2  # one runs on the first hop, the other waits for it there
MOST_IN_FLIGHT = 4  # as many frames of one session as a hop queues


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a chunk's way that takes one chunk at a time: a hop, or the link to one. In milliseconds.

    Attributes:
        fixed_ms: that any chunk keeps it busy for.
        position_ms: and each position of it.
        delay_ms: that a chunk is on its way to it, which keeps nobody else waiting.
    """

    fixed_ms: float
    position_ms: float
    delay_ms: float = 0.0

    def busy_ms(self, positions: int) -> float:
        """How long a chunk keeps it busy."""
        return self.fixed_ms + self.position_ms * positions


@dataclass(frozen=True, slots=True)
class PrefillCut:
    """How a prefill goes: positions in a chunk, at most, and chunks under way at once."""

    chunk: int = MAX_CHUNK
    in_flight: int = LEAST_IN_FLIGHT


def choose_cut(stages: Sequence[Stage], positions: int, most: int = MAX_CHUNK) -> PrefillCut:
    """The cut whose prefill is done soonest; of several the one with the longest chunks.

    Args:
        stages: as `stages_of` gives them; with none, chunks are as long as may be.
        positions: to prefill.
        most: positions that a chunk may have.
    """
    lengths = [most, *range(CHUNK_STEP, min(most, positions), CHUNK_STEP)]
    chunk = min(lengths, key=lambda length: (prefill_ms(stages, positions, length), -length))
    return PrefillCut(chunk, _in_flight(stages, min(chunk, positions)))


def prefill_ms(stages: Sequence[Stage], positions: int, chunk: int) -> float:
    """Milliseconds from the first chunk's departure until the last one has left the last stage."""
    whole, rest = divmod(positions, chunk)
    through = slowest = last = 0.0
    for stage in stages:
        free = 0.0
        if whole:
            through += stage.delay_ms + stage.busy_ms(chunk)
            slowest = max(slowest, stage.busy_ms(chunk))
            free = through + (whole - 1) * slowest
        last = max(last + stage.delay_ms, free) + stage.busy_ms(rest) if rest else free
    return last


def stages_of(route: Route, snapshot: Snapshot, entry_ms: Mapping[str, float]) -> tuple[Stage, ...]:
    """The ways and hops of a route in order, as far as ``snapshot`` knows their nodes; () if it does not know one.

    A decode step reads the same weights as a chunk does, so it is taken for what any chunk costs. Packed weights are
    the exception, since chunks unpack them first, at a price that no step tells: of a route with such a shard nothing
    is known.

    Args:
        entry_ms: round trips to nodes that were first hops, by node id.
    """
    nodes = {node.node_id: node for node in snapshot.nodes}
    stages: list[Stage] = []
    sender: tuple[NodeInfo, ShardInfo] | None = None
    for hop in route.hops:
        node = nodes.get(hop.node_id)
        shard = None if node is None else _shard_of(node, route, hop)
        if node is None or shard is None or shard.dtype != computed_in(shard.dtype):
            return ()
        stages.append(Stage(0.0, 0.0, entry_ms.get(hop.node_id, HOP_MS) / 2) if sender is None else _link(*sender, hop))
        decode_ms = decode_ms_of(node, shard)
        position_ms = decode_ms * DEFAULT_PREFILL_SHARE if shard.prefill_ms is None else shard.prefill_ms
        stages.append(Stage(HOP_MS + decode_ms * len(hop.layers), position_ms * len(hop.layers)))
        sender = node, shard
    return tuple(stages)


def _in_flight(stages: Sequence[Stage], chunk: int) -> int:
    """Enough that the first hop need not wait for the next chunk: one is asked for when the second hop has one."""
    if len(stages) < len(("way", "hop", "way", "hop")):
        return LEAST_IN_FLIGHT
    entry, first, link = stages[:3]
    away_ms = 2 * entry.delay_ms + 2 * link.delay_ms + link.busy_ms(chunk)
    return min(MOST_IN_FLIGHT, max(LEAST_IN_FLIGHT, 1 + ceil(away_ms / max(first.busy_ms(chunk), 1e-6))))


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
