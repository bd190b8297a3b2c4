"""How many sessions each peer has open at a node, so that one gateway cannot take all of its room from the others.

Knows who opened what; what is still held it asks. Knows neither state nor bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from meshnet_core.errors import CacheFullError, InvalidInputError


class PeerSessions:
    """Counts sessions by the peer that opened them.

    Args:
        most: how many each may have at once.
        held: the sessions that the node holds state of now.
    """

    def __init__(self, most: int, held: Callable[[], AbstractSet[str]]) -> None:
        if most < 1:
            raise InvalidInputError(f"each peer may have at least one session, not {most}")
        self._most = most
        self._held = held
        self._opened: dict[str, set[str]] = {}

    def check(self, peer: str, session: str) -> None:
        """That ``peer`` may open ``session``, or open it once more.

        Raises:
            CacheFullError: it has as many others as it may.
        """
        mine = self._opened.get(peer, set())
        if session in mine or len(mine) < self._most:
            return
        self._forget_ended()
        if len(self._opened.get(peer, ())) >= self._most:
            raise CacheFullError(
                f"this gateway has {self._most} sessions here, as many as each may have (--max-sessions-per-peer)"
            )

    def note(self, peer: str, session: str) -> None:
        """``session`` is open, by ``peer``."""
        self._opened.setdefault(peer, set()).add(session)

    def _forget_ended(self) -> None:
        held = self._held()
        self._opened = {peer: left for peer, mine in self._opened.items() if (left := mine & held)}
