"""The shards a node has loaded, with what was measured of them. Knows no sessions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from meshnet_core.errors import CacheMissError, MissReason
from meshnet_core.layer_range import LayerRange
from meshnet_core.membership import ShardInfo
from meshnet_node.model_backend import ShardBackend


@dataclass(slots=True)
class RunningMean:
    """Exponentially weighted mean of a measurement; None until the first."""

    weight: float = 0.1
    value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else self.value + self.weight * (sample - self.value)


@dataclass(slots=True)
class LoadedShard:
    """One loaded shard: the backend that runs it, what it belongs to, and its measured speed.

    Attributes:
        backend: runs its frames.
        model: name under which the model is served.
        fingerprint: of the model's contents.
        max_positions: the longest sequence the model takes.
        text_files: what a gateway needs to turn text into tokens, by file name.
        decode_ms: milliseconds per layer for one decoded position.
        prefill_ms: milliseconds per layer and position of prefill.
    """

    backend: ShardBackend
    model: str
    fingerprint: str
    max_positions: int
    text_files: Mapping[str, bytes] = field(default_factory=dict)
    decode_ms: RunningMean = field(default_factory=RunningMean)
    prefill_ms: RunningMean = field(default_factory=RunningMean)

    def info(self) -> ShardInfo:
        """As it is announced."""
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
        )

    def measure(self, layers: int, positions: int, decode: bool, forward_s: float) -> None:
        """Take in how long ``layers`` layers took over ``positions`` positions."""
        if decode:
            self.decode_ms.add(1000 * forward_s / layers)
        else:
            self.prefill_ms.add(1000 * forward_s / layers / positions)


class ShardPool:
    """Finds the shard that a hop is meant for."""

    def __init__(self, shards: Iterable[LoadedShard] = ()) -> None:
        self._shards = list(shards)

    def __iter__(self) -> Iterator[LoadedShard]:
        return iter(self._shards)

    def find(self, fingerprint: str, layers: LayerRange) -> LoadedShard:
        """The shard whose end is ``layers``' end and that holds its start.

        Raises:
            CacheMissError: no shard of that model here, or none with that range.
        """
        same_model = [shard for shard in self._shards if shard.fingerprint == fingerprint]
        if not same_model:
            raise CacheMissError(
                f"no shard of the model with fingerprint {fingerprint[:12]} is loaded here",
                reason=MissReason.MODEL_MISMATCH,
            )
        for shard in same_model:
            held = shard.backend.layers
            if held.stop == layers.stop and layers.start in held:
                return shard
        held_ranges = ", ".join(str(shard.backend.layers) for shard in same_model)
        raise CacheMissError(
            f"layers {layers} asked for, {held_ranges} held; a hop runs from its start to a shard's end",
            reason=MissReason.RANGE_MISMATCH,
        )
