"""What a node that leaves its layers to the tracker tells of itself, and what it is told. Plain, frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshnet_core.dtypes import dtype_bytes
from meshnet_core.errors import InvalidInputError
from meshnet_core.layer_range import LayerRange
from meshnet_core.model_facts import ModelFacts
from meshnet_core.wire_fields import flag, text, whole


@dataclass(frozen=True, slots=True)
class Placeable:
    """Part of a node's announcement: it takes any layers of one model that fit.

    Attributes:
        memory: bytes that weights and the room kept for sessions may take.
        dtype: what it will hold weights in.
        facts: of the model.
        target: the layers that it holds or is about to load; None while it waits to be told. So the tracker needs to
            remember nothing: what was promised is announced again and again.
    """

    memory: int
    dtype: str
    facts: ModelFacts
    target: LayerRange | None = None

    def __post_init__(self) -> None:
        dtype_bytes(self.dtype)
        if self.target is not None and self.target.stop > self.facts.num_layers:
            raise InvalidInputError(f"layers {self.target} reach beyond the model's {self.facts.num_layers} layers")

    def to_wire(self) -> dict[str, Any]:
        return {
            "memory": self.memory,
            "dtype": self.dtype,
            "facts": self.facts.to_wire(),
            "target": range_to_wire(self.target),
        }

    @classmethod
    def from_wire(cls, document: object) -> Placeable:
        """Read :meth:`to_wire`'s form; unknown fields of a newer peer are passed over.

        Raises:
            InvalidInputError: on a missing, ill-typed or absurd field.
        """
        if not isinstance(document, dict):
            raise InvalidInputError(f"what can be placed is a JSON object, not {type(document).__name__}")
        return cls(
            memory=whole(document, "memory"),
            dtype=text(document, "dtype"),
            facts=ModelFacts.from_wire(document.get("facts")),
            target=range_from_wire(document.get("target")),
        )


@dataclass(frozen=True, slots=True)
class Wish:
    """What the tracker wants of one such node.

    Attributes:
        layers: what it should hold; None while that is not decided yet.
        may_release: whether it may stop serving what else it holds: the others cover the model without that.
    """

    layers: LayerRange | None
    may_release: bool = True

    def to_wire(self) -> dict[str, Any]:
        return {"layers": range_to_wire(self.layers), "may_release": self.may_release}

    @classmethod
    def from_wire(cls, document: dict[str, Any]) -> Wish:
        """Read :meth:`to_wire`'s form.

        Raises:
            InvalidInputError: it is something else.
        """
        return cls(range_from_wire(document.get("layers")), flag(document, "may_release"))


def range_to_wire(layers: LayerRange | None) -> dict[str, int] | None:
    return None if layers is None else {"start": layers.start, "stop": layers.stop}


def range_from_wire(document: object) -> LayerRange | None:
    """None, or ``{"start": 0, "stop": 15}``.

    Raises:
        InvalidInputError: it is something else.
    """
    if document is None:
        return None
    if not isinstance(document, dict):
        raise InvalidInputError(f"layers are null or an object of start and stop, not {type(document).__name__}")
    return LayerRange(whole(document, "start"), whole(document, "stop"))
