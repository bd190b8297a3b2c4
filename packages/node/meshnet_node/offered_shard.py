"""A shard that a node serves, loaded or not, with what was measured of it. Knows no sessions and no other shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from meshnet_core.estimate import RunningEstimate
from meshnet_core.layer_range import LayerRange
from meshnet_core.membership import ShardInfo
from meshnet_node.chunk_times import ChunkTimes
from meshnet_node.lane_schedule import is_step
from meshnet_node.shard_work import ShardBackend

Progress = Callable[[int, int], None]
"""Told (bytes read, bytes to read), from any thread; may raise to stop the loading."""
Loader = Callable[[Progress], ShardBackend]
"""Loads a shard; blocks until it is done."""


@dataclass(slots=True)
class LoadedShard:
    """One loaded shard: the backend that runs it, what it belongs to, and its measured speed.

    Attributes:
        backend: runs its frames.
        model: name under which the model is served.
        fingerprint: of the model's contents.
        max_positions: the longest sequence the model takes.
        decode_ms: milliseconds per layer for one decoded position.
        prefill_ms: milliseconds per layer and position of prefill.
        chunk_times: what chunks cost by their length and place.
    """

    backend: ShardBackend
    model: str
    fingerprint: str
    max_positions: int
    decode_ms: RunningEstimate = field(default_factory=RunningEstimate)
    prefill_ms: RunningEstimate = field(default_factory=RunningEstimate)
    chunk_times: ChunkTimes = field(default_factory=ChunkTimes)

    def info(self, now: float | None = None) -> ShardInfo:
        """As it is announced at ``now`` seconds of the clock that measurements were taken in with."""
        return ShardInfo(
            model=self.model,
            fingerprint=self.fingerprint,
            layers=self.backend.layers,
            num_layers=self.backend.num_layers,
            hidden_size=self.backend.hidden_size,
            max_positions=self.max_positions,
            dtype=self.backend.dtype,
            weight_bytes=self.backend.weight_bytes,
            decode_ms=self.decode_ms.value,
            prefill_ms=self.prefill_ms.value,
            decode_evidence=self.decode_ms.evidence(now),
            prefill_evidence=self.prefill_ms.evidence(now),
            chunk_costs=self.chunk_times.costs(self.decode_ms.value),
        )

    def measure(
        self,
        layers: int,
        positions: int,
        decode: bool,
        forward_s: float,
        now: float = 0.0,
        before: int | None = None,
    ) -> None:
        """Take in how long a frame took.

        Args:
            layers: that it ran through.
            positions: of it.
            decode: whether it was a decode step, or of a prefill.
            forward_s: seconds that it ran.
            now: seconds by some clock.
            before: positions before it; None for one whose time says nothing of what chunks take.
        """
        layer_ms = 1000 * forward_s / layers
        if decode:
            earlier = self.decode_ms.value
            if self.decode_ms.add(layer_ms, now) and earlier and self.decode_ms.value:
                # The machine became another. Prefills are too few to show that soon, so they are expected to follow.
                factor = self.decode_ms.value / earlier
                self.prefill_ms.rescale(factor)
                self.chunk_times.rescale(factor)
            return
        self.prefill_ms.add(layer_ms / positions, now)
        # Reading the weights is most of what so short a frame takes, which a chunk does beside its products.
        if before is not None and not is_step(positions, verify=False):
            self.chunk_times.add(positions, before, layer_ms, self.decode_ms.value)


@dataclass(slots=True, eq=False)  # two offers are never the same for looking alike
class OfferedShard:
    """One shard that a node serves. What was measured of it outlives its being dropped and loaded again.

    Attributes:
        known: what is announced of it before it was ever loaded, with an estimate of its ``weight_bytes``.
        load: loads it; None for one that is held for good.
        text_files: what a gateway needs to turn the model's text into tokens, by file name.
        shard: what is loaded; None while it is not.
    """

    known: ShardInfo
    load: Loader | None
    text_files: Mapping[str, bytes] = field(default_factory=dict)
    shard: LoadedShard | None = None
    decode_ms: RunningEstimate = field(default_factory=RunningEstimate)
    prefill_ms: RunningEstimate = field(default_factory=RunningEstimate)
    chunk_times: ChunkTimes = field(default_factory=ChunkTimes)

    @classmethod
    def held(cls, shard: LoadedShard) -> OfferedShard:
        """One that is loaded already and never dropped."""
        return cls(
            shard.info(),
            None,
            shard=shard,
            decode_ms=shard.decode_ms,
            prefill_ms=shard.prefill_ms,
            chunk_times=shard.chunk_times,
        )

    @property
    def layers(self) -> LayerRange:
        return self.known.layers

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights held, or that loading it is expected to take."""
        return self.known.weight_bytes if self.shard is None else self.shard.backend.weight_bytes

    def info(self, now: float | None = None) -> ShardInfo:
        """As it is announced at ``now`` seconds of the clock that measurements were taken in with."""
        if self.shard is not None:
            return self.shard.info(now)
        return replace(
            self.known,
            loaded=False,
            decode_ms=self.decode_ms.value,
            prefill_ms=self.prefill_ms.value,
            decode_evidence=self.decode_ms.evidence(now),
            prefill_evidence=self.prefill_ms.evidence(now),
            chunk_costs=self.chunk_times.costs(self.decode_ms.value),
        )

    def loaded_with(self, backend: ShardBackend) -> LoadedShard:
        """This shard, run by ``backend``."""
        known = self.known
        return LoadedShard(
            backend,
            known.model,
            known.fingerprint,
            known.max_positions,
            self.decode_ms,
            self.prefill_ms,
            self.chunk_times,
        )

    def __str__(self) -> str:
        return f"layers {self.layers} of {self.known.model}"
