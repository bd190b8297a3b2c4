"""What an answer is held to: a grammar as text, bounded, with the tokens that may end it. Knows no grammar library.

The gateway writes it, the tail compiles it against the model's vocabulary (ADR-0016). Where an answer stands in its
grammar is no state of its own: it follows from the answer's tokens, and is made again from them at open.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from meshnet_core.errors import InvalidInputError, MeshnetError

MAX_GRAMMAR_BYTES = 128 * 1024
MAX_STOP_IDS = 64


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar of answers.

    Attributes:
        lark: rules in llguidance's variant of Lark, ``start`` first; JSON schemas are embedded with ``%json``.
        stop_ids: tokens that end the answer where the grammar allows its end; at least one.

    Raises:
        InvalidInputError: the text is empty or too large, or the ids are none.
    """

    lark: str
    stop_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        try:
            size = len(self.lark.encode())
        except UnicodeEncodeError as error:
            raise InvalidInputError("a grammar must be text that can be written as UTF-8") from error
        if not 0 < size <= MAX_GRAMMAR_BYTES:
            raise InvalidInputError(f"a grammar has 1 to {MAX_GRAMMAR_BYTES} bytes, not {size}")
        if not 0 < len(self.stop_ids) <= MAX_STOP_IDS or any(type(t) is not int or t < 0 for t in self.stop_ids):
            raise InvalidInputError(f"a grammar needs 1 to {MAX_STOP_IDS} stop ids, whole numbers from 0")

    def to_wire(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {"lark": self.lark, "stop_ids": list(self.stop_ids)}

    @classmethod
    def from_wire(cls, document: object) -> Grammar:
        """Read :meth:`to_wire`'s form; an unknown field is an error."""
        if not isinstance(document, dict) or set(document) != {"lark", "stop_ids"}:
            raise InvalidInputError("a grammar is an object of lark and stop_ids")
        lark, stop_ids = document["lark"], document["stop_ids"]
        if not isinstance(lark, str) or not isinstance(stop_ids, list):
            raise InvalidInputError("a grammar's lark is text, its stop_ids are a list")
        return cls(lark, tuple(stop_ids))


@contextmanager
def panics_as(error: type[MeshnetError]) -> Iterator[None]:
    """A panic of a library written in Rust becomes ``error``: it comes as a BaseException that `except Exception` lets
    pass, and would end the thread or the server that it happens in."""
    try:
        yield
    except BaseException as panic:
        if type(panic).__name__ != "PanicException":
            raise
        raise error(f"the grammar library failed: {str(panic)[:200]}") from panic
