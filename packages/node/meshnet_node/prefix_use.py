"""What sessions of a node begin from and leave behind: the prefixes in its store, as sessions meet them.

    open ──> which positions could it begin at? ── first frame: resume there, on a copy
    a frame ends at the system prompt's or the prompt's end ── a copy is held, where the state cannot be cut back
    release ── the state itself is held on

Knows no frames' order and no wire. Everything but `copy_of` runs on the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from meshnet_core.errors import CacheMissError, MissReason
from meshnet_core.frames import MAX_CHUNK, Frame, Phase
from meshnet_core.prefix import Mark
from meshnet_node.cache_store import CacheStore
from meshnet_node.held_prefixes import PrefixKind
from meshnet_node.hop_session import HopSession
from meshnet_node.session_state import SessionState

logger = logging.getLogger(__name__)


class PrefixUse:
    """The prefixes of ``store`` in use.

    Attributes:
        saved: positions that sessions here did not have to prefill.
    """

    def __init__(self, store: CacheStore[HopSession]) -> None:
        self.saved = 0
        self._store = store

    def offer(self, session: HopSession) -> tuple[int, ...]:
        """The positions at which ``session`` could begin, ascending; it must still run its last position itself."""
        document = session.document
        if document.prefix is None or session.state is None:
            return ()
        found = self._store.prefixes.find(_kind(session), document.prefix.marks)
        session.offered = frozenset(position for position in found if position < document.prefill_length)
        return tuple(sorted(session.offered))

    def are_copied(self, session: HopSession) -> bool:
        """Whether prefixes within its prefill can only be held as copies made at the time.

        A session may come to be longer than what is looked at here, and a window slide only then; what it leaves behind
        then serves at its end alone.
        """
        document, state = session.document, session.state
        if document.prefix is None or state is None or self._store.limits.max_prefixes < 1:
            return False
        return not state.cuts_back(min(document.prefill_length + MAX_CHUNK, document.expected_length))

    @contextmanager
    def begun_from(self, session: HopSession, frame: Frame) -> Iterator[SessionState | None]:
        """Hold on to what a resume frame begins from while it runs; None for any other frame.

        Raises:
            CacheMissError: what was there at open is gone.
        """
        if frame.phase is not Phase.RESUME:
            yield None
            return
        with self._store.prefixes.lease(_kind(session), _key_at(session, frame.position)) as held:
            if held is None:
                raise CacheMissError(
                    f"the prefix of {frame.position} positions that was told of at open is gone",
                    reason=MissReason.EVICTED,
                )
            session.inherited = {key: at for key, at in held.positions.items() if at <= frame.position}
            yield held.state
        self.saved += frame.position

    def wants_copy(self, session: HopSession, end: int) -> bool:
        """Whether a copy of the state after ``end`` positions had better be held."""
        document = session.document
        if document.prefix is None or end not in document.prefix.keep_at or not self.are_copied(session):
            return False
        if self._store.prefixes.covers(_kind(session), frozenset({_key_at(session, end)})):
            return False
        return session.shard.backend.state_bytes(document.hop.layers.start, end) <= self._store.free_nbytes

    def keep_copy(self, session: HopSession, copy: SessionState) -> None:
        """Hold a copy of the session's state; it counts from now on."""
        self._store.keep(_kind(session), {_key_at(session, copy.position): copy.position}, copy)

    def left_by(self, session: HopSession, keep: Sequence[Mark]) -> dict[str, int]:
        """Where the state of a session that is to be released could serve; asked before it leaves the store.

        Args:
            session: whatever became of it.
            keep: marks of the positions beyond its prefill. Without any, nothing is held on.
        """
        prefix, state = session.document.prefix, session.state
        if prefix is None or state is None or not keep or state.spoiled:
            return {}
        if session.in_flight or session.cancelled or not 0 < session.accepted <= state.position:
            return {}
        positions = {mark.key: mark.position for mark in (*prefix.marks, *keep)}
        if state.cuts_back():  # drafts that were wrong may stand beyond what was accepted
            return session.inherited | {key: at for key, at in positions.items() if at <= session.accepted}
        if state.position > session.accepted:
            return {}
        return {key: at for key, at in positions.items() if at == state.position}

    def keep(self, session: HopSession, positions: dict[str, int]) -> None:
        """Hold the state of a session that has left the store, where `left_by` said that it could serve."""
        if positions and session.state is not None:
            session.state.let_go_of_way_back()
            self._store.keep(_kind(session), positions, session.state)


def copy_of(state: SessionState | None) -> SessionState | None:
    """A copy of a state that no frame runs on, made on the lane's thread; None where memory is too short for it."""
    try:
        return None if state is None else state.copied()
    except (RuntimeError, MemoryError) as error:  # torch's errors of memory are RuntimeErrors; an answer must not die
        logger.warning("no copy of a prefix was made: %s", error)
        return None


def _kind(session: HopSession) -> PrefixKind:
    prefix = session.document.prefix
    return PrefixKind.of(session.document, "" if prefix is None else prefix.scope)


def _key_at(session: HopSession, position: int) -> str:
    marks = () if session.document.prefix is None else session.document.prefix.marks
    return next((mark.key for mark in marks if mark.position == position), "")
