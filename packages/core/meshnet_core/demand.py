"""What one generation will ask of a route, as far as its caller knows. Plain, frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshnet_core.errors import InvalidInputError
from meshnet_core.ids import check_id
from meshnet_core.link_info import MAX_MS
from meshnet_core.wire_fields import flag, optional_number, whole

USUAL_POSITIONS = 128  # of a prompt, and of an answer, where nobody says: a short question and its answer
MAX_NAMED = 1000  # nodes that one demand tells something of


@dataclass(frozen=True, slots=True)
class Demand:
    """Lengths decide what counts: prefill for a long prompt, decode steps and round trips for a long answer.

    Attributes:
        prompt: positions of the prompt.
        answer: tokens that the answer is expected to have, at least one.
        held: positions of this very prompt whose state a node still holds, by node id.
        entry_ms: milliseconds of a round trip from the caller to nodes that may be the first hop, by node id.
        explore: whether a node that is not known well may be tried on it; not on one that has failed already.

    Raises:
        InvalidInputError: on lengths that cannot be.
    """

    prompt: int = USUAL_POSITIONS
    answer: int = USUAL_POSITIONS
    held: Mapping[str, int] = field(default_factory=dict)
    entry_ms: Mapping[str, float] = field(default_factory=dict)
    explore: bool = True

    def __post_init__(self) -> None:
        if self.prompt < 0 or self.answer < 1:
            raise InvalidInputError(
                f"a demand is a prompt of 0 positions or more and an answer of at least 1 token, "
                f"not {self.prompt} and {self.answer}"
            )

    def to_wire(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "answer": self.answer,
            **({"held": dict(self.held)} if self.held else {}),
            **({"entry_ms": dict(self.entry_ms)} if self.entry_ms else {}),
            "explore": self.explore,
        }

    @classmethod
    def from_wire(cls, document: object) -> Demand:
        """Read :meth:`to_wire`'s form; a length that is missing is the usual one.

        Raises:
            InvalidInputError: on an unknown, ill-typed or absurd field.
        """
        if not isinstance(document, dict):
            raise InvalidInputError(f"a demand is a JSON object, not {type(document).__name__}")
        if unknown := set(document) - {"prompt", "answer", "held", "entry_ms", "explore"}:
            raise InvalidInputError(f"unknown fields in a demand: {', '.join(sorted(unknown))[:200]}")
        held, entry = _named(document, "held"), _named(document, "entry_ms")
        return cls(
            prompt=whole(document, "prompt") if "prompt" in document else USUAL_POSITIONS,
            answer=whole(document, "answer", least=1) if "answer" in document else USUAL_POSITIONS,
            held={node_id: whole(held, node_id) for node_id in held},
            entry_ms={node_id: optional_number(entry, node_id, most=MAX_MS) or 0.0 for node_id in entry},
            explore=flag(document, "explore") if "explore" in document else True,
        )


def _named(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    named = document.get(key, {})
    if not isinstance(named, dict) or len(named) > MAX_NAMED:
        raise InvalidInputError(f"{key} must be an object with at most {MAX_NAMED} node ids, not {repr(named)[:80]}")
    for node_id in named:
        check_id(node_id, f"a node id in {key}")
    return named
