"""What nodes tell about themselves and what a tracker knows at one moment: plain, frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from meshnet_core.chunk_costs import ChunkCosts
from meshnet_core.dtypes import dtype_bytes
from meshnet_core.errors import InvalidInputError
from meshnet_core.estimate import Evidence
from meshnet_core.frames import PROTOCOL_MAX, PROTOCOL_MIN
from meshnet_core.ids import check_id
from meshnet_core.layer_range import LayerRange
from meshnet_core.link_info import MAX_LINKS, MAX_MS, LinkInfo
from meshnet_core.placeable import Placeable
from meshnet_core.wire_fields import flag, items, optional_number, optional_whole, text, whole

MAX_SHARDS = 1024  # of one node


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One shard that a node serves, as the node announces it.

    Attributes:
        model: name under which the model is served.
        fingerprint: of its contents; shards with different ones never share a route.
        layers: what the shard holds.
        num_layers, hidden_size, max_positions: of the whole model.
        dtype: what it computes in.
        weight_bytes: bytes of weights held; estimated while it is not loaded.
        decode_ms, prefill_ms: running means of measured milliseconds per layer for one decoded position, and per
            layer and position of prefill; None until measured.
        loaded: whether it is in memory. One that is not is loaded when a session opens on it, which takes a while.
        decode_evidence, prefill_evidence: what stands behind these means; None until measured.
        chunk_costs: what chunks of a prefill cost by their length and place; None until measured.
    """

    model: str
    fingerprint: str
    layers: LayerRange
    num_layers: int
    hidden_size: int
    max_positions: int
    dtype: str
    weight_bytes: int = 0
    decode_ms: float | None = None
    prefill_ms: float | None = None
    loaded: bool = True
    decode_evidence: Evidence | None = None
    prefill_evidence: Evidence | None = None
    chunk_costs: ChunkCosts | None = None

    def __post_init__(self) -> None:
        dtype_bytes(self.dtype)
        if self.layers.stop > self.num_layers:
            raise InvalidInputError(f"layers {self.layers} reach beyond the model's {self.num_layers} layers")

    def to_wire(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "fingerprint": self.fingerprint,
            "start": self.layers.start,
            "stop": self.layers.stop,
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "max_positions": self.max_positions,
            "dtype": self.dtype,
            "weight_bytes": self.weight_bytes,
            "decode_ms": self.decode_ms,
            "prefill_ms": self.prefill_ms,
            "loaded": self.loaded,
            "decode_evidence": self.decode_evidence and self.decode_evidence.to_wire(),
            "prefill_evidence": self.prefill_evidence and self.prefill_evidence.to_wire(),
            "chunk_costs": self.chunk_costs and self.chunk_costs.to_wire(),
        }

    @classmethod
    def from_wire(cls, document: object) -> ShardInfo:
        """Read :meth:`to_wire`'s form; unknown fields of a newer peer are passed over.

        Raises:
            InvalidInputError: on a missing, ill-typed or absurd field.
        """
        if not isinstance(document, dict):
            raise InvalidInputError(f"a shard is a JSON object, not {type(document).__name__}")
        return cls(
            model=text(document, "model"),
            fingerprint=text(document, "fingerprint"),
            layers=LayerRange(whole(document, "start"), whole(document, "stop")),
            num_layers=whole(document, "num_layers", least=1),
            hidden_size=whole(document, "hidden_size", least=1),
            max_positions=whole(document, "max_positions", least=1),
            dtype=text(document, "dtype"),
            weight_bytes=whole(document, "weight_bytes"),
            decode_ms=optional_number(document, "decode_ms", most=MAX_MS),
            prefill_ms=optional_number(document, "prefill_ms", most=MAX_MS),
            loaded=flag(document, "loaded") if "loaded" in document else True,  # older nodes hold all they announce
            decode_evidence=Evidence.optional_from_wire(document.get("decode_evidence")),
            prefill_evidence=Evidence.optional_from_wire(document.get("prefill_evidence")),
            chunk_costs=ChunkCosts.optional_from_wire(document.get("chunk_costs")),
        )


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One node, as it announces itself with every heartbeat.

    Attributes:
        node_id: chosen by the node, the same over restarts.
        url: where others dial it.
        boot: boot id of this start.
        version: meshnet version; versions of torch and transformers follow it, for people to read.
        device: ``cpu``, ``cuda`` or ``mps``.
        shards: what it serves.
        sessions, state_bytes, queued: load at the time of the heartbeat.
        draining: takes no new sessions.
        protocol_min, protocol_max: wire protocols it speaks.
        links: to nodes that it has sent frames to, or probed, lately.
        free_bytes, budget_bytes: of session state, that it could still hold and may hold in all; None if not told.
        max_sessions: that it may hold state of; None if not told.
        placement: what the tracker needs to choose its layers; None for one that was given them.
        started: milliseconds since 1970 at which this start began, by the node's own clock: of two starts under one id
            the later one counts.
        beat: number of this announcement among those of this start, from 1; 0 where it is not counted.
    """

    node_id: str
    url: str
    boot: str
    version: str
    device: str
    shards: tuple[ShardInfo, ...]
    sessions: int = 0
    state_bytes: int = 0
    queued: int = 0
    draining: bool = False
    protocol_min: int = PROTOCOL_MIN
    protocol_max: int = PROTOCOL_MAX
    links: tuple[LinkInfo, ...] = ()
    free_bytes: int | None = None
    budget_bytes: int | None = None
    max_sessions: int | None = None
    placement: Placeable | None = None
    started: int = 0
    beat: int = 0

    def __post_init__(self) -> None:
        check_id(self.node_id, "node id")
        if not self.url.startswith(("http://", "https://")):
            raise InvalidInputError(f"a node's url begins with http:// or https://, not {self.url!r}")

    def to_wire(self) -> dict[str, Any]:
        return {
            "node_id": self.node_id,
            "url": self.url,
            "boot": self.boot,
            "version": self.version,
            "device": self.device,
            "shards": [shard.to_wire() for shard in self.shards],
            "sessions": self.sessions,
            "state_bytes": self.state_bytes,
            "queued": self.queued,
            "draining": self.draining,
            "protocol_min": self.protocol_min,
            "protocol_max": self.protocol_max,
            "links": [link.to_wire() for link in self.links],
            "free_bytes": self.free_bytes,
            "budget_bytes": self.budget_bytes,
            "max_sessions": self.max_sessions,
            **({"placement": self.placement.to_wire()} if self.placement is not None else {}),
            "started": self.started,
            "beat": self.beat,
        }

    @classmethod
    def from_wire(cls, document: object) -> NodeInfo:
        """Read :meth:`to_wire`'s form; unknown fields of a newer peer are passed over.

        Raises:
            InvalidInputError: on a missing, ill-typed or absurd field.
        """
        if not isinstance(document, dict):
            raise InvalidInputError(f"a node's announcement is a JSON object, not {type(document).__name__}")
        protocol_min = whole(document, "protocol_min")
        return cls(
            node_id=text(document, "node_id"),
            url=text(document, "url", longest=2048),
            boot=check_id(document.get("boot"), "boot"),
            version=text(document, "version"),
            device=text(document, "device"),
            shards=tuple(ShardInfo.from_wire(shard) for shard in items(document, "shards", most=MAX_SHARDS)),
            sessions=whole(document, "sessions"),
            state_bytes=whole(document, "state_bytes"),
            queued=whole(document, "queued"),
            draining=flag(document, "draining"),
            protocol_min=protocol_min,
            protocol_max=whole(document, "protocol_max", least=protocol_min),
            links=tuple(LinkInfo.from_wire(link) for link in items(document, "links", most=MAX_LINKS))
            if "links" in document
            else (),
            free_bytes=optional_whole(document, "free_bytes"),
            budget_bytes=optional_whole(document, "budget_bytes"),
            max_sessions=optional_whole(document, "max_sessions"),
            placement=None if document.get("placement") is None else Placeable.from_wire(document["placement"]),
            started=whole(document, "started") if "started" in document else 0,
            beat=whole(document, "beat") if "beat" in document else 0,
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All live nodes at one moment, in the order of their ids.

    Attributes:
        nodes: as they announced themselves.
        settled: whether every node had a whole lease's time to announce itself. A tracker that started lately may not
            know all of them yet.
    """

    nodes: tuple[NodeInfo, ...]
    settled: bool = field(default=True, compare=False)

    def and_those_of(self, earlier: Snapshot) -> Snapshot:
        """With the nodes that only ``earlier`` has."""
        known = {node.node_id for node in self.nodes}
        nodes = (*self.nodes, *(node for node in earlier.nodes if node.node_id not in known))
        return Snapshot(tuple(sorted(nodes, key=lambda node: node.node_id)), self.settled)

    def to_wire(self) -> dict[str, Any]:
        return {"nodes": [node.to_wire() for node in self.nodes], "settled": self.settled}

    @classmethod
    def from_wire(cls, document: object) -> Snapshot:
        if not isinstance(document, dict) or not isinstance(document.get("nodes"), list):
            raise InvalidInputError("a snapshot is a JSON object with a list of nodes")
        settled = flag(document, "settled") if "settled" in document else True  # older trackers do not tell
        return cls(tuple(NodeInfo.from_wire(node) for node in document["nodes"]), settled)
