"""How many sessions each peer has open at a node, so that one gateway cannot take all of its room from the others.

Knows who opened what; what is still held it asks. Knows neither state nor bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager

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
        self._under_way: Counter[tuple[str, str]] = Counter()  # opens, by peer and session

    @contextmanager
    def opening(self, peer: str, session: str) -> Iterator[None]:
        """``peer`` opens ``session`` in the block, or opens it once more; it counts from now on, unless that fails.

        Raises:
            CacheFullError: it has as many others as it may.
        """
        if len(self._of(peer) | {session}) > self._most:
            self._forget_ended()
            if len(self._of(peer) | {session}) > self._most:
                raise CacheFullError(
                    f"this gateway has {self._most} sessions here, as many as each may have (--max-sessions-per-peer)"
                )
        self._under_way[peer, session] += 1
        try:
            yield
            self._opened.setdefault(peer, set()).add(session)
        finally:
            self._under_way[peer, session] -= 1
            if not self._under_way[peer, session]:
                del self._under_way[peer, session]

    def _of(self, peer: str) -> set[str]:
        return self._opened.get(peer, set()) | {session for by, session in self._under_way if by == peer}

    def _forget_ended(self) -> None:
        held = self._held()
        self._opened = {peer: left for peer, mine in self._opened.items() if (left := mine & held)}
