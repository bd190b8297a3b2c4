"""A link from one node to another, as the one that sends measured it. Plain, frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshnet_core.errors import InvalidInputError
from meshnet_core.estimate import Evidence
from meshnet_core.ids import check_id
from meshnet_core.wire_fields import optional_number, text

MAX_MS = 1e9  # of a measured time: more is no measurement
MAX_LINKS = 64  # that one node tells
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A node that may come right after another one on a route, and where it is dialled."""

    node_id: str
    url: str

    @classmethod
    def from_wire(cls, document: object) -> Neighbour:
        """Read an object of ``node_id`` and ``url``; unknown fields are passed over.

        Raises:
            InvalidInputError: on a missing or ill-typed field.
        """
        if not isinstance(document, dict):
            raise InvalidInputError(f"a neighbour is a JSON object, not {type(document).__name__}")
        return cls(check_id(document.get("node_id"), "a neighbour's node id"), text(document, "url", longest=2048))


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """What a post to another node costs, beyond what that node spends on it.

    Attributes:
        node_id: the node at the other end.
        rtt_ms: running mean, milliseconds from a small post's departure to its reply's arrival, less what the other
            node says it spent; the software at both ends is in it.
        rtt_evidence: what stands behind it.
        mib_ms: running mean, milliseconds by which a post takes longer for each MiB of its body: the inverse of the
            bandwidth. None until a large one was sent.
        mib_evidence: what stands behind that.
    """

    node_id: str
    rtt_ms: float
    rtt_evidence: Evidence
    mib_ms: float | None = None
    mib_evidence: Evidence | None = None

    def __post_init__(self) -> None:
        check_id(self.node_id, "a link's node id")

    def to_wire(self) -> dict[str, Any]:
        return {
            "node_id": self.node_id,
            "rtt_ms": self.rtt_ms,
            "rtt_evidence": self.rtt_evidence.to_wire(),
            "mib_ms": self.mib_ms,
            "mib_evidence": self.mib_evidence and self.mib_evidence.to_wire(),
        }

    @classmethod
    def from_wire(cls, document: object) -> LinkInfo:
        """Read :meth:`to_wire`'s form; unknown fields of a newer peer are passed over.

        Raises:
            InvalidInputError: on a missing, ill-typed or absurd field.
        """
        if not isinstance(document, dict):
            raise InvalidInputError(f"a link is a JSON object, not {type(document).__name__}")
        rtt_ms = optional_number(document, "rtt_ms", most=MAX_MS)
        if rtt_ms is None:
            raise InvalidInputError("a link needs rtt_ms, the round trip in milliseconds")
        return cls(
            node_id=check_id(document.get("node_id"), "a link's node id"),
            rtt_ms=rtt_ms,
            rtt_evidence=Evidence.from_wire(document.get("rtt_evidence")),
            mib_ms=optional_number(document, "mib_ms", most=MAX_MS),
            mib_evidence=Evidence.optional_from_wire(document.get("mib_evidence")),
        )
