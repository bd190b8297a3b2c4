"""A route: an ordered list of hops whose layers cover the model exactly once. How one is chosen is `planning`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshnet_core.dtypes import dtype_bytes
from meshnet_core.errors import InvalidInputError
from meshnet_core.frames import PROTOCOL_MAX
from meshnet_core.layer_range import LayerRange
from meshnet_core.wire_fields import items, text, whole

MAX_HOPS = 1024
_FIRST_PROTOCOL = 1  # which is not told: peers that speak no other know no such field


@dataclass(frozen=True, slots=True)
class Hop:
    """One node's part of a route.

    Attributes:
        node_id: the node.
        url: where it is dialled, such as ``http://10.0.0.7:7410``.
        layers: from the effective start to the end of the node's shard.
        dtype: what the shard computes in.
        version: the node's meshnet version.
    """

    node_id: str
    url: str
    layers: LayerRange
    dtype: str = "float32"
    version: str = ""

    def __post_init__(self) -> None:
        dtype_bytes(self.dtype)

    def to_wire(self) -> dict[str, Any]:
        return {
            "node_id": self.node_id,
            "url": self.url,
            "start": self.layers.start,
            "stop": self.layers.stop,
            "dtype": self.dtype,
            "version": self.version,
        }

    @classmethod
    def from_wire(cls, document: object) -> Hop:
        """Read :meth:`to_wire`'s form; unknown fields of a newer peer are passed over.

        Raises:
            InvalidInputError: on a missing or ill-typed field.
        """
        if not isinstance(document, dict):
            raise InvalidInputError(f"a hop is a JSON object, not {type(document).__name__}")
        return cls(
            node_id=text(document, "node_id"),
            url=text(document, "url", longest=2048),
            layers=LayerRange(whole(document, "start"), whole(document, "stop")),
            dtype=text(document, "dtype"),
            version=text(document, "version") if document.get("version") else "",
        )


@dataclass(frozen=True, slots=True)
class Route:
    """Hops in order, validated to cover layers ``0`` to ``num_layers`` exactly once.

    ``protocol`` is the wire protocol's version in which the gateway and the hops speak about a session on it.

    Raises:
        InvalidInputError: on a gap, an overlap, or ends that are not the model's.
    """

    model: str
    fingerprint: str
    num_layers: int
    hops: tuple[Hop, ...]
    protocol: int = PROTOCOL_MAX

    def __post_init__(self) -> None:
        at = 0
        for index, hop in enumerate(self.hops):
            if hop.layers.start != at:
                raise InvalidInputError(f"hop {index} starts at layer {hop.layers.start}, but layer {at} is next")
            at = hop.layers.stop
        if at != self.num_layers:
            raise InvalidInputError(f"the hops end at layer {at} of {self.num_layers}")

    def to_wire(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "fingerprint": self.fingerprint,
            "num_layers": self.num_layers,
            "hops": [hop.to_wire() for hop in self.hops],
            **({"protocol": self.protocol} if self.protocol != _FIRST_PROTOCOL else {}),
        }

    @classmethod
    def from_wire(cls, document: object) -> Route:
        """Read :meth:`to_wire`'s form; unknown fields of a newer peer are passed over, missing ones are an error."""
        if not isinstance(document, dict):
            raise InvalidInputError(f"a route is a JSON object, not {type(document).__name__}")
        return cls(
            model=text(document, "model"),
            fingerprint=text(document, "fingerprint"),
            num_layers=whole(document, "num_layers", least=1),
            hops=tuple(Hop.from_wire(hop) for hop in items(document, "hops", most=MAX_HOPS)),
            protocol=whole(document, "protocol") if "protocol" in document else _FIRST_PROTOCOL,
        )

    def __str__(self) -> str:
        return " -> ".join(f"{hop.node_id}[{hop.layers}]" for hop in self.hops)
