"""What is remembered of sessions that left a node, why and up to which epoch, so that late frames get honest misses.

One tombstone a session, however many hops of it were here. Bounded: the oldest are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from meshnet_core.errors import MissReason
from meshnet_core.wire_fields import MAX_WHOLE

EVERY_EPOCH = MAX_WHOLE  # no document names a later one


@dataclass(slots=True)
class _Tombstone:
    """Of one session: up to which epoch it was released, -1 for none, and what became of each of its hops here."""

    released_through: int = -1
    hops: dict[int, tuple[MissReason, int]] = field(default_factory=dict)


class Tombstones:
    """Tombstones by session.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_session: OrderedDict[str, _Tombstone] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._by_session)

    def bury(self, session: str, hop_index: int, reason: MissReason, epoch: int) -> None:
        """What this hop held of ``epoch`` is gone."""
        self._of(session).hops[hop_index] = (reason, epoch)
        self._forget()

    def release(self, session: str, through_epoch: int) -> None:
        """Whatever comes of epochs up to this one comes too late, at any hop, also where none was ever here."""
        tombstone = self._of(session)
        # Releases may overtake each other, and one of a few epochs takes nothing back from one of all.
        tombstone.released_through = max(tombstone.released_through, through_epoch)
        if tombstone.released_through == EVERY_EPOCH:
            tombstone.hops.clear()  # nothing more can be said of them
        self._forget()

    def open(self, session: str, hop_index: int) -> None:
        """This hop is here again, in a newer epoch."""
        if (tombstone := self._by_session.get(session)) is not None:
            tombstone.hops.pop(hop_index, None)
            if not tombstone.hops and tombstone.released_through < 0:
                del self._by_session[session]

    def of(self, session: str, hop_index: int) -> tuple[MissReason, int]:
        """Why this hop has nothing of the session, and up to which epoch that is so; -1 where nothing is known."""
        tombstone = self._by_session.get(session)
        if tombstone is None:
            return MissReason.UNKNOWN_SESSION, -1
        reason, epoch = tombstone.hops.get(hop_index, (MissReason.UNKNOWN_SESSION, -1))
        if tombstone.released_through >= max(epoch, 0):
            return MissReason.RELEASED, tombstone.released_through
        return reason, epoch

    def was_here(self, session: str) -> bool:
        """Whether some hop of it was here and may come back."""
        tombstone = self._by_session.get(session)
        return tombstone is not None and bool(tombstone.hops)

    def is_over(self, session: str) -> bool:
        """Whether it was released for good."""
        tombstone = self._by_session.get(session)
        return tombstone is not None and tombstone.released_through == EVERY_EPOCH

    def _of(self, session: str) -> _Tombstone:
        tombstone = self._by_session.setdefault(session, _Tombstone())
        self._by_session.move_to_end(session)
        return tombstone

    def _forget(self) -> None:
        while len(self._by_session) > self._most:
            self._by_session.popitem(last=False)
