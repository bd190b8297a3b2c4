"""What a model's layers take and where it may be cut, as placement needs to know it before anything is loaded.

Counted in elements, not bytes: machines hold the same model at different dtypes. Knows no machine and no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from meshnet_core.dtypes import PACKED_WEIGHT_BYTES, dtype_bytes, weight_width
from meshnet_core.errors import InvalidInputError
from meshnet_core.layer_range import LayerRange
from meshnet_core.wire_fields import items, text, whole

MAX_LAYERS = 4096  # of one model; the largest that exist have fewer than 200


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One model's sizes.

    Attributes:
        model: name under which it is served.
        fingerprint: of its contents; machines with different ones never hold parts of one plan.
        layers: elements of each layer's weights.
        embedding: elements that come with layer 0.
        head: elements that come with the last layer: final norm and output projection, also where it is the
            embedding matrix.
        shared: elements of ``embedding`` and ``head`` that a machine with both ends holds once (tied embeddings).
        room: elements of session state kept free for each layer.
        cuts: where the model may be cut, each the first layer after the cut, ascending; None for anywhere.

    Raises:
        InvalidInputError: no layers, negative sizes, or cuts that are not between two layers.
    """

    model: str
    fingerprint: str
    layers: tuple[int, ...]
    embedding: int = 0
    head: int = 0
    shared: int = 0
    room: int = 0
    cuts: tuple[int, ...] | None = None
    # Sums of the first n layers' elements, room included: what a range takes is a difference of two.
    _sums: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _boundaries: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _head_layers: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < len(self.layers) <= MAX_LAYERS:
            raise InvalidInputError(f"a model has 1 to {MAX_LAYERS} layers, not {len(self.layers)}")
        if min(*self.layers, self.embedding, self.head, self.shared, self.room) < 0:
            raise InvalidInputError("sizes of layers are never negative")
        if self.shared > min(self.embedding, self.head):
            raise InvalidInputError("what both ends share is part of both")
        if self.cuts is not None and any(not 0 < cut < self.num_layers for cut in self.cuts):
            raise InvalidInputError(f"cuts lie between two of the layers 0-{self.num_layers - 1}, not at {self.cuts}")
        if self.cuts is not None and list(self.cuts) != sorted(set(self.cuts)):
            raise InvalidInputError("cuts are given in ascending order, each once")
        sums = [0]
        for size in self.layers:
            sums.append(sums[-1] + size + self.room)
        cuts = range(1, self.num_layers) if self.cuts is None else self.cuts
        object.__setattr__(self, "_sums", tuple(sums))
        object.__setattr__(self, "_boundaries", (0, *cuts, self.num_layers))
        object.__setattr__(self, "_head_layers", self.head * self.num_layers / max(1, sum(self.layers)))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def sums(self) -> tuple[int, ...]:
        """Elements of the first n layers, with the room kept for them; ``num_layers + 1`` entries."""
        return self._sums

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Where a range may begin or end: 0, the cuts, and the number of layers."""
        return self._boundaries

    @property
    def head_layers(self) -> float:
        """How many layers the head weighs: reading weights is what a decoded position costs."""
        return self._head_layers

    def elements(self, start: int, stop: int) -> int:
        """Elements that a shard of ``[start, stop)`` holds, with the room kept for it."""
        ends = (start == 0, stop == self.num_layers)
        extra = self.embedding * ends[0] + self.head * ends[1] - self.shared * all(ends)
        return self._sums[stop] - self._sums[start] + extra

    def weight_elements(self, layers: LayerRange) -> int:
        """Elements of weights alone."""
        return self.elements(layers.start, layers.stop) - self.room * len(layers)

    def width(self, dtype: str) -> float:
        """Bytes of an element, weights and the room kept for sessions together, on a machine of that dtype.

        Packed weights are narrower than session state, and what begins and ends the model is held in eight bits or
        more, so this is a mean: of the layer where it is largest, or of the whole model.
        """
        state, weight = dtype_bytes(dtype), weight_width(dtype)
        if weight == state:
            return state
        layers = [(weight * size + state * self.room) / (size + self.room) for size in self.layers if size + self.room]
        ends = self.embedding + self.head - self.shared
        inner = weight * sum(self.layers) + state * self.room * self.num_layers
        total = self.elements(0, self.num_layers)
        return max(*layers, (inner + PACKED_WEIGHT_BYTES["int8"] * ends) / total, weight) if total else weight

    def to_wire(self) -> dict[str, Any]:
        """JSON-ready; equal layers in a row travel as ``[elements, how many]``."""
        return {
            "model": self.model,
            "fingerprint": self.fingerprint,
            "layers": [[size, len(list(run))] for size, run in groupby(self.layers)],
            "embedding": self.embedding,
            "head": self.head,
            "shared": self.shared,
            "room": self.room,
            "cuts": None if self.cuts is None else list(self.cuts),
        }

    @classmethod
    def from_wire(cls, document: object) -> ModelFacts:
        """Read :meth:`to_wire`'s form; unknown fields of a newer peer are passed over.

        Raises:
            InvalidInputError: on a missing, ill-typed or absurd field.
        """
        if not isinstance(document, dict):
            raise InvalidInputError(f"facts of a model are a JSON object, not {type(document).__name__}")
        return cls(
            model=text(document, "model"),
            fingerprint=text(document, "fingerprint"),
            layers=tuple(_unrolled(items(document, "layers", most=MAX_LAYERS))),
            embedding=whole(document, "embedding"),
            head=whole(document, "head"),
            shared=whole(document, "shared"),
            room=whole(document, "room"),
            cuts=None if document.get("cuts") is None else _cuts(items(document, "cuts", most=MAX_LAYERS)),
        )


def _unrolled(runs: Iterable[object]) -> list[int]:
    sizes: list[int] = []
    for run in runs:
        if not isinstance(run, list) or len(run) != 2:
            raise InvalidInputError(f"layers are lists of [elements, how many], not {str(run)[:80]}")
        row = {"elements": run[0], "how many": run[1]}
        size, times = whole(row, "elements"), whole(row, "how many", least=1)
        if len(sizes) + times > MAX_LAYERS:
            raise InvalidInputError(f"a model has at most {MAX_LAYERS} layers")
        sizes += [size] * times
    return sizes


def _cuts(values: list[object]) -> tuple[int, ...]:
    return tuple(whole({"a cut": value}, "a cut", least=1) for value in values)
