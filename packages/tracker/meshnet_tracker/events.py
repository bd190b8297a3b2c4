"""What happens to nodes in a directory, as typed values that read as log lines, and the log that numbers them."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshnet_core.membership import NodeInfo

KEPT = 1000  # events that a log remembers


@dataclass(frozen=True, slots=True)
class Joined:
    """A node that the directory did not know."""

    kind: ClassVar[str] = "join"
    node: NodeInfo

    def __str__(self) -> str:
        held = ", ".join(f"{shard.model} {shard.layers} {shard.dtype}" for shard in self.node.shards) or "nothing yet"
        return f"node {self.node.node_id} joined from {self.node.url}, serving {held}"


@dataclass(frozen=True, slots=True)
class Restarted:
    """A node that came back under another boot id while its lease was still running."""

    kind: ClassVar[str] = "restart"
    node: NodeInfo
    before: NodeInfo

    def __str__(self) -> str:
        moved = "" if self.node.url == self.before.url else f", now at {self.node.url} instead of {self.before.url}"
        return f"node {self.node.node_id} restarted ({self.before.boot} -> {self.node.boot}){moved}"


@dataclass(frozen=True, slots=True)
class DrainChanged:
    """A node that began to turn new sessions away, or takes them again."""

    node: NodeInfo

    @property
    def kind(self) -> str:
        return "drain" if self.node.draining else "undrain"

    def __str__(self) -> str:
        return f"node {self.node.node_id} {'is draining' if self.node.draining else 'takes sessions again'}"


@dataclass(frozen=True, slots=True)
class Left:
    """A node that said goodbye."""

    kind: ClassVar[str] = "leave"
    node: NodeInfo

    def __str__(self) -> str:
        return f"node {self.node.node_id} left"


@dataclass(frozen=True, slots=True)
class Expired:
    """A node that has not been heard of for a whole lease: what counts as its death."""

    kind: ClassVar[str] = "death"
    node: NodeInfo
    silent_s: float

    def __str__(self) -> str:
        return f"node {self.node.node_id} was not heard of for {self.silent_s:.1f} s: its lease has expired"


DirectoryEvent = Joined | Restarted | DrainChanged | Left | Expired
KINDS = ("join", "restart", "drain", "undrain", "leave", "death")


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """An event with its number, counted from 1, and when it was noticed, in seconds since 1970."""

    seq: int
    at: float
    event: DirectoryEvent

    def to_wire(self) -> dict[str, Any]:
        event = self.event
        return {
            "seq": self.seq,
            "at": round(self.at, 3),
            "kind": event.kind,
            "node": event.node.node_id,
            "text": str(event),
        }


class EventLog:
    """The last events of one directory, numbered in the order in which this tracker noticed them.

    Args:
        wall_clock: seconds since 1970, for people to read.
        kept: how many events are remembered.
    """

    def __init__(self, wall_clock: Callable[[], float], *, kept: int = KEPT) -> None:
        self._wall_clock = wall_clock
        self._events: deque[LoggedEvent] = deque(maxlen=kept)
        self._more = asyncio.Event()
        self.last = 0

    def add(self, event: DirectoryEvent) -> None:
        """Give ``event`` the next number."""
        self.last += 1
        self._events.append(LoggedEvent(self.last, self._wall_clock(), event))
        self._more.set()

    def since(self, seq: int) -> list[LoggedEvent]:
        """The events that came after number ``seq`` and are remembered, in order."""
        return [logged for logged in self._events if logged.seq > seq]

    async def wait(self, seq: int, seconds: float) -> None:
        """Until there is an event after number ``seq``, at most ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                while self.last <= seq:
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError:
            return
