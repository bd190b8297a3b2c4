"""What one hop keeps between the frames of one session: a cache object, and how far it has come.

Knows no shapes and no kinds: K/V, sliding windows, conv and recurrent states, indexer keys are all "tensors somewhere
in the cache object". Position is counted here and never asked of the cache, since a hop may hold no attention layer at
all. Knows nothing of limits, lifetimes or sessions' names; those are the cache store's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from transformers import DynamicCache

from meshnet_core.layer_range import LayerRange

_PLAIN = (int, str, float, bytes, type, torch.device, torch.dtype)
_DEPTH = 8


class SessionState:
    """State of layers ``layers`` of one session after ``position`` positions.

    Mutated by one forward at a time. A forward that raised or was cancelled may have advanced some layers and not
    others: the backend then calls :meth:`spoil`, and the owner must drop the object.

    Attributes:
        layers: the hop's range, from its effective start to the shard's end (absolute indices).
        position: positions consumed so far.
        cache: transformers' cache object, for the backend alone.
        spoiled: a forward did not finish; no frame may use this state again.
    """

    __slots__ = ("_nbytes", "cache", "layers", "position", "spoiled")

    def __init__(self, layers: LayerRange, cache: DynamicCache) -> None:
        self.layers = layers
        self.position = 0
        self.cache = cache
        self.spoiled = False
        self._nbytes: int | None = None

    def advance(self, count: int) -> None:
        """Note that a forward of ``count`` positions finished in every layer."""
        self.position += count
        self._nbytes = None

    def spoil(self) -> None:
        """Note that a forward did not finish; the state is of no further use."""
        self.spoiled = True
        self._nbytes = None

    @property
    def nbytes(self) -> int:
        """Bytes of storage held by every tensor in the cache object.

        Counts each storage once and whole: a sliding window that is a view of a longer tensor keeps all of it alive.
        """
        if self._nbytes is None:
            storages = {}
            for tensor in self.tensors():
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            self._nbytes = sum(storages.values())
        return self._nbytes

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor the cache object holds, in a stable order."""
        return iter(walk_tensors(self.cache))


def walk_tensors(holder: object) -> list[torch.Tensor]:
    """Every tensor in an object's attributes, lists, tuples and dicts, at any nesting up to eight deep."""
    found: list[torch.Tensor] = []
    _collect(holder, found, 0)
    return found


def tensors_of_each_layer(cache: DynamicCache) -> list[list[torch.Tensor]]:
    """The tensors of each layer, from every list in the cache object that has an entry for each of them."""
    count = len(cache.layers)
    lists = [value for value in vars(cache).values() if isinstance(value, list) and len(value) == count]
    return [walk_tensors([entries[index] for entries in lists]) for index in range(count)]


def _collect(holder: object, found: list[torch.Tensor], depth: int) -> None:
    """Runs once for each step and layer: the plain values that most attributes are come first."""
    if holder is None or isinstance(holder, _PLAIN):
        return
    if isinstance(holder, torch.Tensor):
        found.append(holder)
        return
    if depth > _DEPTH:
        return
    if isinstance(holder, dict):
        children: Iterable[object] = holder.values()
    elif isinstance(holder, (list, tuple)):
        children = holder
    else:
        children = getattr(holder, "__dict__", {}).values()
    for child in children:
        _collect(child, found, depth + 1)
