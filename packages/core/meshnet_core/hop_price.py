"""What a hop costs, in milliseconds for each token of the answer: from what was measured of its node and links. Pure.

    hop's price = layers run x (decode ms + prefill ms x prompt still to be taken in / answer)
                + frames ahead of it x what the node's whole shard takes for one decode step
                + what short room makes it wait + what loading the shard makes it wait
    link's price = round trip x (1 + chunks of the prompt / answer) + bytes of (1 + prompt / answer) positions

The prompt's cost is shared out over the answer's tokens, so that a price means the same for every length. Whole
nanoseconds: sums of integers do not depend on their order, and a tie is a tie.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from meshnet_core.dtypes import dtype_bytes, weight_width
from meshnet_core.frames import MAX_CHUNK
from meshnet_core.link_info import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshnet_core.coverage import Offer
    from meshnet_core.demand import Demand
    from meshnet_core.estimate import Evidence
    from meshnet_core.link_info import LinkInfo
    from meshnet_core.membership import NodeInfo, ShardInfo

# Milliseconds per layer and decoded position of a 16-bit shard that has not been measured yet; one of 32 bits reads
# twice the bytes and takes twice as long. On the fast side, so that a new node is tried, and then measured, soon.
DEFAULT_DECODE_MS = {"cuda": 0.05, "mps": 0.2, "cpu": 0.5}
# A position of a prefill chunk beside a decoded one, where only the latter was measured: 0.05 of 0.91 ms were measured
# for SmolLM2 on a CPU.
DEFAULT_PREFILL_SHARE = 1 / 16
# One more hop costs a small post: 0.42 ms there and back over loopback (ADR-0002). It is what links cost to a node that
# knows none of its own, and a MiB what gigabit Ethernet takes.
HOP_MS = 0.4
DEFAULT_MIB_MS = 8.0
# Frames that a newcomer finds ahead of it at a node, for each session there: a session of a route of two hops has its
# frame at one of them about half of the time.
FRAMES_PER_SESSION = 0.5
# Milliseconds that a shard which is not loaded costs more for each step: some seconds of loading, shared by the hundred
# steps of a short answer. So one that is loaded is preferred, unless it is far slower.
UNLOADED_MS = 50.0
# The same for a node that has no room: a wait of some seconds for somebody's session to end. It rises from nothing
# where a fifth of the room is left.
FULL_MS = 50.0
SHORT_OF_ROOM = 0.2

# How far a mean may be off, as a share of it: three standard errors, but never so little that two equal machines are
# told apart by chance, nor so much that a node twice as slow is taken for a fast one.
ERRORS = 3.0
LEAST_SPREAD, MOST_SPREAD = 0.01, 0.25

NS = 1_000_000  # in a millisecond


@dataclass(frozen=True, slots=True)
class HopPrice:
    """A usable shard's price, in nanoseconds for each token of the answer.

    Attributes:
        rate: for each layer run.
        queue, room, load: for the frames ahead, for short room, for a shard that is not loaded.
    """

    rate: int
    queue: int
    room: int
    load: int

    @property
    def fixed(self) -> int:
        """What does not depend on the layers run."""
        return self.queue + self.room + self.load


def price_hop(offer: Offer, demand: Demand, lean: float = 0.0) -> HopPrice:
    """The price of a hop on ``offer``.

    Args:
        offer: a shard and its node.
        demand: what is asked of it.
        lean: from -1 to 1, how far to lean towards the fast or the slow end of what the mean may be.
    """
    node, shard = offer
    decode_ms = decode_ms_of(node, shard)
    if lean:
        decode_ms *= 1 + lean * spread_of(shard.decode_ms, shard.decode_evidence)
    prefill_ms = decode_ms * DEFAULT_PREFILL_SHARE if shard.prefill_ms is None else shard.prefill_ms
    to_take_in = max(0, demand.prompt - demand.held.get(node.node_id, 0))
    decode = max(1, round(decode_ms * NS))
    frames_ahead = node.queued + FRAMES_PER_SESSION * node.sessions
    return HopPrice(
        rate=decode + round(prefill_ms * NS * to_take_in / demand.answer),
        queue=int(frames_ahead * decode * len(shard.layers)),
        room=round(FULL_MS * NS * shortage_of(node)),
        load=0 if shard.loaded else round(UNLOADED_MS * NS),
    )


def price_link(sender: Offer, link: LinkInfo | None, demand: Demand) -> int:
    """Nanoseconds, for each token of the answer, that it takes to hand its positions on from ``sender``.

    Over a link that was not measured it is expected to take what the sender's others take: were it taken for a short
    one, answers would find out one after the other which ones are long.
    """
    return next(iter(price_links(sender, [link], demand)))


def price_links(
    sender: Offer, links: Sequence[LinkInfo | None], demand: Demand, leans: Sequence[float] | None = None
) -> list[int]:
    """The same for several links; each leans as told, as for `price_hop`, but for what was not measured."""
    node, shard = sender
    posts = NS * _posts(demand)
    mib = NS * shard.hidden_size * dtype_bytes(shard.dtype) / MIB * (1 + demand.prompt / demand.answer)
    prices = []
    for index, link in enumerate(links):
        if link is None:
            rtt_ms = fmean([known.rtt_ms for known in node.links]) if node.links else HOP_MS
            mib_ms = DEFAULT_MIB_MS
        else:
            rtt_ms, mib_ms = link.rtt_ms, DEFAULT_MIB_MS if link.mib_ms is None else link.mib_ms
            if leans is not None:
                rtt_ms *= 1 + leans[index] * spread_of(rtt_ms, link.rtt_evidence)
        prices.append(round(rtt_ms * posts + mib_ms * mib))
    return prices


def price_entry(node_id: str, demand: Demand) -> int:
    """The same for the caller's posts to the first hop, whose bodies are a few bytes of token ids."""
    rtt_ms = demand.entry_ms.get(node_id)
    if rtt_ms is None:
        rtt_ms = fmean(demand.entry_ms.values()) if demand.entry_ms else HOP_MS
    return round(NS * rtt_ms * _posts(demand))


def decode_ms_of(node: NodeInfo, shard: ShardInfo) -> float:
    """Milliseconds per layer and decoded position, measured or by default."""
    if shard.decode_ms is not None:
        return shard.decode_ms
    return DEFAULT_DECODE_MS.get(node.device, DEFAULT_DECODE_MS["cpu"]) * weight_width(shard.dtype) / 2


def spread_of(mean: float | None, behind: Evidence | None) -> float:
    """How far a mean may be off, as a share of it; the most where nothing was measured."""
    if mean is None:
        return MOST_SPREAD
    if behind is None or not mean:
        return LEAST_SPREAD
    spread = ERRORS * behind.standard_error / mean
    return LEAST_SPREAD if spread < LEAST_SPREAD else min(spread, MOST_SPREAD)


def shortage_of(node: NodeInfo) -> float:
    """How short a node's room is: 0 with a fifth of it left or more, 1 where there is none."""
    left = 1.0
    if node.max_sessions is not None:
        left = min(left, 1 - node.sessions / node.max_sessions) if node.max_sessions else 0.0
    if node.free_bytes is not None and node.budget_bytes is not None:
        left = min(left, node.free_bytes / node.budget_bytes) if node.budget_bytes else 0.0
    return min(1.0, max(0.0, 1 - left / SHORT_OF_ROOM))


def _posts(demand: Demand) -> float:
    """Posts for each token of the answer: its decode step, and its share of the prompt's chunks."""
    return 1 + demand.prompt / MAX_CHUNK / demand.answer
