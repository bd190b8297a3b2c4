"""A mesh that is only simulated: machines that come, go, die and slow down, in places that lie apart. Seeded, no clock.

Machines measure themselves and their links with the production types, and announce themselves as nodes do. What a
machine really takes, and what a link really takes, is known here and to nobody that plans.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from meshnet_core.clock import Clock
from meshnet_core.estimate import RunningEstimate
from meshnet_core.layer_range import LayerRange
from meshnet_core.link_times import LinkTimes
from meshnet_core.membership import NodeInfo, ShardInfo
from meshnet_core.model_facts import ModelFacts
from meshnet_tracker.machine import Machine

MODEL, FINGERPRINT = "m", "f" * 64
LAYERS, HIDDEN = 128, 8192
NOISE = 0.1  # standard deviation of one measured step, as a share of it
SLOW = 5.0  # times as long as usual, during a slow spell
BETWEEN_FRAMES = 0.5  # of a step that each further session on a machine adds to everybody's
SITES = 5
NEAR_MS = (0.3, 0.6)
FAR_MS = (5.0, 40.0)


def facts() -> ModelFacts:
    """A model of 128 layers, about 30 billion elements."""
    return ModelFacts(MODEL, FINGERPRINT, (230_000_000,) * LAYERS, 600_000_000, 600_000_000, 0, room=8_000_000)


@dataclass
class SimulatedNode:
    """One machine: what it is, what it knows of itself, and who uses it."""

    node_id: str
    site: int
    usual_ms: float
    memory: int
    clock: Clock
    layers: LayerRange | None = None
    slow_until: float = 0.0
    sessions: int = 0
    beat: int = 0
    told: NodeInfo | None = None  # last
    decode_ms: RunningEstimate = field(default_factory=RunningEstimate)
    prefill_ms: RunningEstimate = field(default_factory=RunningEstimate)
    links: LinkTimes = field(init=False)

    def __post_init__(self) -> None:
        self.links = LinkTimes(self.clock)

    @property
    def true_ms(self) -> float:
        """Milliseconds per layer and decoded position, right now, for one session alone."""
        return self.usual_ms * (SLOW if self.clock.now() < self.slow_until else 1.0)

    @property
    def machine(self) -> Machine:
        """As placement sees it."""
        known_ms = self.usual_ms if self.decode_ms.value is None else self.decode_ms.value
        return Machine(self.node_id, self.memory, 2, known_ms, 0.4, self.layers)

    def measure(self, steps: int, rng: random.Random) -> None:
        """Take in some decode steps, and one prefill."""
        now = self.clock.now()
        for _ in range(steps):
            self.decode_ms.add(max(0.0, self.true_ms * rng.gauss(1, NOISE)), now)
        self.prefill_ms.add(max(0.0, self.true_ms / 16 * rng.gauss(1, NOISE)), now)

    def measured_age_s(self) -> float:
        behind = self.decode_ms.evidence(self.clock.now())
        return float("inf") if behind is None else behind.age_s

    def info(self) -> NodeInfo:
        """As it announces itself."""
        self.beat += 1
        now = self.clock.now()
        held = () if self.layers is None else (self._shard(self.layers, now),)
        return NodeInfo(
            node_id=self.node_id,
            url=f"http://{self.node_id}:7410",
            boot=f"b-{self.node_id}",
            version="0.1.0",
            device="cuda",
            shards=held,
            sessions=self.sessions,
            links=self.links.told(),
            beat=self.beat,
        )

    def _shard(self, layers: LayerRange, now: float) -> ShardInfo:
        return ShardInfo(
            model=MODEL,
            fingerprint=FINGERPRINT,
            layers=layers,
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            max_positions=8192,
            dtype="bfloat16",
            decode_ms=self.decode_ms.value,
            prefill_ms=self.prefill_ms.value,
            decode_evidence=self.decode_ms.evidence(now),
            prefill_evidence=self.prefill_ms.evidence(now),
        )


class Geography:
    """How long round trips between machines really take: little within a site, more between two of them."""

    def __init__(self, rng: random.Random) -> None:
        self._far = {(a, b): rng.uniform(*FAR_MS) for a in range(SITES) for b in range(a)}
        self._near = [rng.uniform(*NEAR_MS) for _ in range(SITES)]

    def rtt_ms(self, one: SimulatedNode, other: SimulatedNode) -> float:
        if one.site == other.site:
            return self._near[one.site]
        return self._far[max(one.site, other.site), min(one.site, other.site)]


def new_node(number: int, clock: Clock, rng: random.Random) -> SimulatedNode:
    """A machine of some speed and memory, at some site; the nearest site has most of them."""
    return SimulatedNode(
        node_id=f"n{number:05}",
        site=min(rng.randrange(SITES), rng.randrange(SITES)),
        usual_ms=0.1 * 10 ** rng.uniform(0, 1),
        memory=int(rng.uniform(4, 24) * 2**30),
        clock=clock,
    )
