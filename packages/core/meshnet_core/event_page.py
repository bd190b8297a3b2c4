"""What a tracker tells of what happened to nodes: events with their numbers, as ``GET /v1/events`` answers them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshnet_core.errors import InvalidInputError
from meshnet_core.ids import check_id
from meshnet_core.wire_fields import items, optional_number, text, whole

MAX_EVENTS = 10_000  # in one answer
MAX_AT_S = 1e11  # seconds since 1970: any date there will be
LONGEST_TEXT = 65_536  # characters: a node that joins names all of its shards


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """One thing that happened to a node.

    Attributes:
        seq: its number in the tracker's log, counted from 1.
        at: when the tracker noticed it, in seconds since 1970 by its clock.
        kind: ``join``, ``restart``, ``drain``, ``undrain``, ``leave`` or ``death``.
        node: id of the node.
        text: what happened, in words.
    """

    seq: int
    at: float
    kind: str
    node: str
    text: str

    def to_wire(self) -> dict[str, Any]:
        return {"seq": self.seq, "at": self.at, "kind": self.kind, "node": self.node, "text": self.text}

    @classmethod
    def from_wire(cls, document: object) -> NodeEvent:
        """Read :meth:`to_wire`'s form.

        Raises:
            InvalidInputError: on a missing or ill-typed field.
        """
        if not isinstance(document, dict):
            raise InvalidInputError(f"an event is a JSON object, not {type(document).__name__}")
        return cls(
            seq=whole(document, "seq", least=1),
            at=optional_number(document, "at", most=MAX_AT_S) or 0.0,
            kind=text(document, "kind"),
            node=check_id(document.get("node"), "an event's node id"),
            text=text(document, "text", longest=LONGEST_TEXT),
        )


@dataclass(frozen=True, slots=True)
class EventPage:
    """The events after a number, in order.

    Attributes:
        log: whose numbers they are: those of one start of a tracker.
        last: number of the newest event there is.
        missed: how many after the number asked for are no longer kept.
        events: the others.
    """

    log: str
    last: int
    missed: int
    events: tuple[NodeEvent, ...]

    @classmethod
    def from_wire(cls, document: dict[str, Any]) -> EventPage:
        """Read an answer.

        Raises:
            InvalidInputError: on a missing or ill-typed field.
        """
        return cls(
            log=check_id(document.get("log"), "the log of events"),
            last=whole(document, "last"),
            missed=whole(document, "missed"),
            events=tuple(map(NodeEvent.from_wire, items(document, "events", most=MAX_EVENTS))),
        )
