"""Prefixes: the first positions of a session, named by a hash of their token ids, so that later ones can begin there.

A *mark* is a position and the hash of all token ids before it. Who knows the ids (the gateway) makes marks; hops, most
of which see hidden states alone, only compare them. A hash takes in every id from the first on, so equal marks mean
equal prefixes, and prefixes that differ anywhere have no mark in common beyond that place.

    token ids    17  4  88  5 | 23  9  11  2 | 60 ...
    marks                     4              8         each hashes all ids to its left
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshnet_core.errors import InvalidInputError
from meshnet_core.ids import check_id
from meshnet_core.wire_fields import items

EVERYONE = "everyone"  # the scope where nobody has to say who they are
MAX_MARKS = 2**14  # of one document
_KEY_BYTES = 16  # a collision among n prefixes of one scope has odds of n*n / 2**129


class Mark(NamedTuple):
    """``key`` is the hash of the first ``position`` token ids, as hex."""

    position: int
    key: str


@dataclass(frozen=True, slots=True)
class PrefixTerms:
    """What a hop is told at open of the prefixes of a session.

    Attributes:
        scope: whose prefixes may be used, and who may use those of this session; different scopes share nothing.
        marks: ascending, of the token ids that this epoch prefills.
        keep_at: positions among the marks' at which state that cannot be cut back had better be kept for others.
    """

    scope: str
    marks: tuple[Mark, ...]
    keep_at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_id(self.scope, "a prefix's scope")
        check_marks(self.marks)
        if strays := set(self.keep_at).difference(mark.position for mark in self.marks):
            raise InvalidInputError(f"keep_at names position {min(strays)}, which has no mark")

    def to_wire(self) -> dict[str, Any]:
        return {"scope": self.scope, "marks": marks_to_wire(self.marks), "keep_at": list(self.keep_at)}

    @classmethod
    def from_wire(cls, document: object) -> PrefixTerms:
        """Read :meth:`to_wire`'s form.

        Raises:
            InvalidInputError: on a missing, ill-typed or unknown field.
        """
        if not isinstance(document, Mapping) or set(document) != {"scope", "marks", "keep_at"}:
            raise InvalidInputError('prefix must be a JSON object of "scope", "marks" and "keep_at"')
        keep_at = items(document, "keep_at", most=MAX_MARKS)
        if any(type(position) is not int for position in keep_at):
            raise InvalidInputError("keep_at must be a list of whole numbers")
        return cls(document["scope"], marks_from_wire(document["marks"]), tuple(keep_at))


def marks_of(tokens: Sequence[int], positions: Iterable[int]) -> tuple[Mark, ...]:
    """Marks at those of ``positions`` that lie within ``tokens``; the farthest `MAX_MARKS` if they are more."""
    wanted = sorted({position for position in positions if 0 < position <= len(tokens)})[-MAX_MARKS:]
    marks, hashed, hashing = [], 0, hashlib.blake2b(digest_size=_KEY_BYTES)
    for position in wanted:
        part = tokens[hashed:position]
        hashing.update(struct.pack(f"<{len(part)}i", *part))
        marks.append(Mark(position, hashing.hexdigest()))
        hashed = position
    return tuple(marks)


def check_marks(marks: Sequence[Mark]) -> None:
    """Whether they ascend and have keys of the right form.

    Raises:
        InvalidInputError: they do not.
    """
    if len(marks) > MAX_MARKS:
        raise InvalidInputError(f"{len(marks)} marks are more than {MAX_MARKS}")
    before = 0
    for position, key in marks:
        if position <= before:
            raise InvalidInputError(f"marks must ascend from position 1; {position} comes after {before}")
        if len(key) != 2 * _KEY_BYTES or not set(key) <= set("0123456789abcdef"):
            raise InvalidInputError(f"a mark's key is {2 * _KEY_BYTES} digits of lower-case hex, not {key[:80]!r}")
        before = position


def marks_to_wire(marks: Iterable[Mark]) -> list[list[Any]]:
    return [list(mark) for mark in marks]


def marks_from_wire(value: object) -> tuple[Mark, ...]:
    """Read :func:`marks_to_wire`'s form.

    Raises:
        InvalidInputError: it is not a list of ``[position, key]``, or they do not ascend.
    """
    if not isinstance(value, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int and isinstance(pair[1], str)
        for pair in value
    ):
        raise InvalidInputError("marks must be a list of [position, key] pairs")
    marks = tuple(Mark(*pair) for pair in value)
    check_marks(marks)
    return marks
