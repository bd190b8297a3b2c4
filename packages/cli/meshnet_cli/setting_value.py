"""Whether a value of a settings' file is of the kind that its option takes. What an option takes is read from text
everywhere else, and click reads it so: of `true` it makes the number 1, of `1.5` a name. Knows no option by name."""

from __future__ import annotations

from typing import Any

from meshnet_core.errors import InvalidInputError


def check_kind(value: Any, meant: Any, *, switch: bool) -> None:
    """Refuse a value that click would bend until it fits.

    Args:
        value: as the file has it.
        meant: what click made of it; of a list, a list.
        switch: whether the option is one that is on or off.

    Raises:
        InvalidInputError: it is of another kind than the option's; says which that is.
    """
    if isinstance(meant, list | tuple) and isinstance(value, list):
        for one, of_it in zip(value, meant, strict=True):
            check_kind(one, of_it, switch=switch)
    elif switch != isinstance(value, bool):
        raise InvalidInputError("write true or false" if switch else f"write {_kind_of(meant)}, not {words(value)}")
    elif isinstance(meant, str) and not isinstance(value, str | int):
        raise InvalidInputError(f"write {_kind_of(meant)}, in quotes")
    elif isinstance(meant, int) and isinstance(value, float):
        raise InvalidInputError("write a whole number, without a point")


def _kind_of(meant: Any) -> str:
    match meant:
        case int():
            return "a whole number"
        case float():
            return "a number"
        case _:
            return "a text"


def words(value: Any) -> str:
    """A value as it is in the file, near enough."""
    return str(value).lower() if isinstance(value, bool) else repr(value)
