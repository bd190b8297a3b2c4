"""What trackers of one mesh tell one another of nodes: who was heard of, and who said goodbye.

Values and their JSON forms, and which of two is the newer one. Knows no lease, no clock and no registry.

Every announcement of one start of a node has a greater ``beat`` than those before it, and every start of a node a
greater ``started`` (its own machine's clock). So of any two announcements of one node one is the newer, whoever heard
them, in whatever order they came: trackers that have seen the same ones agree, and a late or repeated one changes
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshnet_core.errors import InvalidInputError
from meshnet_core.ids import check_id
from meshnet_core.membership import NodeInfo
from meshnet_core.wire_fields import text, whole

if TYPE_CHECKING:
    from collections.abc import Mapping


def start_of(node: NodeInfo) -> tuple[int, str]:
    """The order of a node's starts: the later start is the greater one; boot ids decide between equal clocks."""
    return node.started, node.boot


@dataclass(frozen=True, slots=True)
class Goodbye:
    """One start of a node is over.

    Attributes:
        node_id, boot: which start.
        through_beat: its announcements up to this one are over, later ones are not; None where all are.
        owner: id of the machine that says so; None in a mesh without certificates.
    """

    node_id: str
    boot: str
    through_beat: int | None = None
    owner: str | None = None

    def covers(self, node: NodeInfo, owner: str | None) -> bool:
        """Whether an announcement of ``owner`` is one of those that are over."""
        if (node.node_id, node.boot, owner) != (self.node_id, self.boot, self.owner):
            return False
        return self.through_beat is None or 0 < node.beat <= self.through_beat

    def to_wire(self) -> dict[str, Any]:
        return {"node_id": self.node_id, "boot": self.boot, "through_beat": self.through_beat, "owner": self.owner}

    @classmethod
    def from_wire(cls, document: object) -> Goodbye:
        """Read :meth:`to_wire`'s form.

        Raises:
            InvalidInputError: on a missing or ill-typed field.
        """
        if not isinstance(document, dict):
            raise InvalidInputError(f"a goodbye is a JSON object, not {type(document).__name__}")
        return cls(
            node_id=check_id(document.get("node_id"), "node id"),
            boot=check_id(document.get("boot"), "boot"),
            through_beat=None if document.get("through_beat") is None else whole(document, "through_beat"),
            owner=_owner(document),
        )


@dataclass(frozen=True, slots=True)
class Heard:
    """An announcement.

    Attributes:
        node: what was announced.
        left_s: what is left of the lease that it was given, in seconds.
        owner: id of the machine that announced it; None in a mesh without certificates.
    """

    node: NodeInfo
    left_s: float
    owner: str | None = None


Told = Heard | Goodbye
"""What a node itself tells a tracker."""


def told_to_wire(told: Told) -> dict[str, Any]:
    """The JSON form of either, without the time that is left; read back by :func:`told_from_wire`."""
    if isinstance(told, Goodbye):
        return {"goodbye": told.to_wire()}
    return {"node": told.node.to_wire(), "owner": told.owner}


def told_from_wire(document: Mapping[str, Any], left_s: float) -> Told:
    """Read :func:`told_to_wire`'s form, of which ``left_s`` seconds are left.

    Raises:
        InvalidInputError: it is neither, or a field of it is wrong.
    """
    if "goodbye" in document:
        return Goodbye.from_wire(document["goodbye"])
    return Heard(NodeInfo.from_wire(document.get("node")), left_s, _owner(document))


def _owner(document: Mapping[str, Any]) -> str | None:
    return None if document.get("owner") is None else text(document, "owner")
