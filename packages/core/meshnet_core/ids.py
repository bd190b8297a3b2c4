"""Ids that are minted once and then only compared."""

from __future__ import annotations

import re
import secrets

from meshnet_core.errors import InvalidInputError

_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def mint_session_id() -> str:
    """A new session id: 128 random bits, so that knowing one session never helps to name another."""
    return f"s-{secrets.token_hex(16)}"


def mint_boot_id() -> str:
    """A new boot id: one per start of a node process, so that a restart is told from an eviction."""
    return f"b-{secrets.token_hex(8)}"


def mint_tracker_id() -> str:
    """A new tracker id: one per start of a tracker."""
    return f"t-{secrets.token_hex(8)}"


def check_id(value: object, what: str) -> str:
    """``value`` if it is fit to be an id on the wire.

    Raises:
        InvalidInputError: if it is not 1 to 64 characters of ``A-Z a-z 0-9 _ . -``.
    """
    if not isinstance(value, str) or _ID.fullmatch(value) is None:
        raise InvalidInputError(f"{what} must be 1 to 64 characters of A-Z a-z 0-9 _ . -, not {str(value)[:80]!r}")
    return value
