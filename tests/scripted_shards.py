"""Shards without tensors, for tests of how they are loaded and dropped."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from meshnet_core.layer_range import LayerRange
from meshnet_core.membership import ShardInfo
from meshnet_node.offered_shard import OfferedShard, Progress
from meshnet_node.shard_work import ShardBackend

LAYERS = LayerRange(0, 4)


@dataclass
class ScriptedBackend:
    """What the pool looks at in a backend."""

    info: ShardInfo
    closed: bool = False

    @property
    def layers(self) -> LayerRange:
        return self.info.layers

    @property
    def num_layers(self) -> int:
        return self.info.num_layers

    @property
    def hidden_size(self) -> int:
        return self.info.hidden_size

    @property
    def dtype(self) -> str:
        return self.info.dtype

    @property
    def weight_bytes(self) -> int:
        return self.info.weight_bytes

    def close(self) -> None:
        self.closed = True


@dataclass
class ScriptedShards:
    """Several models of one shard each; ``made`` has every backend that was ever loaded, with its model.

    Attributes:
        gate: a load waits for it; open at first.
        failures: what the next loads of a model raise.
    """

    names: Sequence[str]
    weight_bytes: int = 1
    made: list[tuple[str, ScriptedBackend]] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    failures: dict[str, Exception] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gate.set()

    def offers(self) -> list[OfferedShard]:
        return [self.offer(name) for name in self.names]

    def offer(self, name: str, layers: LayerRange = LAYERS) -> OfferedShard:
        info = ShardInfo(name, fingerprint(name), layers, 4, 8, 64, "float32", self.weight_bytes)

        def load(progress: Progress) -> ShardBackend:
            progress(1, 4)
            assert self.gate.wait(20)
            if name in self.failures:
                raise self.failures[name]
            backend = ScriptedBackend(info)
            self.made.append((name, backend))
            return cast("ShardBackend", backend)

        return OfferedShard(info, load)

    def live(self) -> list[str]:
        """Models in memory, the order in which they were loaded."""
        return [name for name, backend in self.made if not backend.closed]

    def loads(self, name: str) -> int:
        return sum(made == name for made, _ in self.made)


def fingerprint(name: str) -> str:
    return name * 8
