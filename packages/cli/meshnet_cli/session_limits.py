"""What a node may hold for sessions, as people say it: bytes with a unit, a count, seconds. Knows no device."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshnet_core.errors import InvalidInputError

DEFAULT_MAX_SESSIONS = 256
DEFAULT_SESSION_TTL_S = 600.0
DEFAULT_DRAIN_GRACE_S = 30.0
MAX_PREFIXES = 256  # their marks take memory too, up to a megabyte each, which no budget counts
SHORTEST_TTL_S, LONGEST_TTL_S = 1.0, 30 * 86400.0
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B?)", re.ASCII | re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class SessionLimits:
    """Bounds of one node's sessions.

    Attributes:
        cache_bytes: for the state of all sessions; None takes a share of the memory that is free.
        max_sessions: how many at once.
        max_sessions_per_peer: how many of them each gateway may have; None for all.
        session_ttl_s: how long one may be unused, in seconds.
        drain_grace_s: how long running ones have to move before the node leaves, in seconds.
        prefix_reuse: whether state of finished turns is held on for the turns that go on from them.
    """

    cache_bytes: int | None = None
    max_sessions: int = DEFAULT_MAX_SESSIONS
    session_ttl_s: float = DEFAULT_SESSION_TTL_S
    drain_grace_s: float = DEFAULT_DRAIN_GRACE_S
    prefix_reuse: bool = True
    max_sessions_per_peer: int | None = None

    @classmethod
    def given(
        cls,
        cache_bytes: str | None,
        max_sessions: int,
        session_ttl_s: float,
        drain_grace_s: float = DEFAULT_DRAIN_GRACE_S,
        *,
        prefix_reuse: bool = True,
    ) -> SessionLimits:
        """From the values of the options.

        Raises:
            InvalidInputError: one of them cannot be right.
        """
        if max_sessions < 1:
            raise InvalidInputError(
                f"--max-sessions {max_sessions}: give at least 1; --cache-bytes 0 serves without keeping any state"
            )
        if not SHORTEST_TTL_S <= session_ttl_s <= LONGEST_TTL_S:  # refuses nan too
            raise InvalidInputError(
                f"--session-ttl {session_ttl_s:g}: give seconds from {SHORTEST_TTL_S:g} to {LONGEST_TTL_S:g}"
            )
        if not 0 <= drain_grace_s <= LONGEST_TTL_S:
            raise InvalidInputError(
                f"--drain-grace {drain_grace_s:g}: give seconds from 0, which leaves at once, to {LONGEST_TTL_S:g}"
            )
        nbytes = None if cache_bytes is None else parse_bytes(cache_bytes, option="--cache-bytes")
        return cls(nbytes, max_sessions, session_ttl_s, drain_grace_s, prefix_reuse)

    def arguments(self) -> tuple[str, ...]:
        """The options as a node is given them."""
        cache_bytes = () if self.cache_bytes is None else ("--cache-bytes", str(self.cache_bytes))
        return (
            *cache_bytes,
            *("--max-sessions", str(self.max_sessions)),
            *("--session-ttl", str(self.session_ttl_s)),
            *("--drain-grace", str(self.drain_grace_s)),
            *(() if self.prefix_reuse else ("--no-prefix-reuse",)),
        )


def parse_bytes(text: str, *, option: str) -> int:
    """``512M``, ``2GiB``, ``1.5G``, ``1000000``: units are powers of 1024, but with a B alone (``MB``) powers of 1000.

    Raises:
        InvalidInputError: it is none of these; names ``option``.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or ("i" in match[3].lower() and not match[2]):
        raise InvalidInputError(f"{option} {text!r} is no number of bytes; write it like 512M, 2GiB or 1000000000")
    base = 1000 if match[3].lower() == "b" else 1024
    return int(float(match[1]) * base ** _POWERS[match[2].upper()])
