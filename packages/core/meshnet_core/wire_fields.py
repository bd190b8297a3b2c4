"""Fields of JSON documents, read without guessing: a number that came as text is an error, not a number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshnet_core.errors import InvalidInputError

MAX_WHOLE = 2**53  # whole numbers up to here are the same in every JSON reader, and in float arithmetic
MAX_TEXT = 256  # characters


def whole(document: Mapping[str, Any], key: str, *, least: int = 0) -> int:
    """A whole number from ``least`` to `MAX_WHOLE`.

    Raises:
        InvalidInputError: if it is missing or anything else; likewise for the functions below.
    """
    value = _present(document, key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_WHOLE:
        raise InvalidInputError(f"{key} must be a whole number from {least} to {MAX_WHOLE}, not {_shown(value)}")
    return value


def flag(document: Mapping[str, Any], key: str) -> bool:
    """True or false."""
    value = _present(document, key)
    if not isinstance(value, bool):
        raise InvalidInputError(f"{key} must be true or false, not {_shown(value)}")
    return value


def text(document: Mapping[str, Any], key: str, *, longest: int = MAX_TEXT) -> str:
    """1 to ``longest`` printable characters, fit for a log line."""
    value = _present(document, key)
    if not isinstance(value, str) or not 0 < len(value) <= longest or not value.isprintable():
        raise InvalidInputError(f"{key} must be 1 to {longest} printable characters, not {_shown(value)}")
    return value


def optional_number(document: Mapping[str, Any], key: str, *, most: float) -> float | None:
    """A finite number from 0 to ``most``; None where the field is null or missing."""
    value = document.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most or math.isnan(value):
        raise InvalidInputError(f"{key} must be null or a number from 0 to {most:g}, not {_shown(value)}")
    return float(value)


def optional_whole(document: Mapping[str, Any], key: str) -> int | None:
    """A whole number from 0 to `MAX_WHOLE`; None where the field is null or missing."""
    return None if document.get(key) is None else whole(document, key)


def items(document: Mapping[str, Any], key: str, *, most: int) -> list[Any]:
    """A list of at most ``most`` items of any kind."""
    value = _present(document, key)
    if not isinstance(value, list) or len(value) > most:
        raise InvalidInputError(f"{key} must be a list of at most {most} items, not {_shown(value)}")
    return value


def _present(document: Mapping[str, Any], key: str) -> Any:
    if key not in document:
        raise InvalidInputError(f"the field {key} is missing")
    return document[key]


def _shown(value: object) -> str:
    return repr(value)[:80] if not isinstance(value, int) or abs(value) < 10**80 else "a number far beyond that"
