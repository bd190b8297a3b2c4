"""What one hop keeps between the frames of one session: a cache object, and how far it has come.

Knows no shapes and no kinds: K/V, sliding windows, conv and recurrent states, indexer keys are all "tensors somewhere
in the cache object". Position is counted here and never asked of the cache, since a hop may hold no attention layer at
all. Knows nothing of limits, lifetimes or sessions' names; those are the cache store's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from meshnet_core.layer_range import LayerRange
from meshnet_core.open_document import FallBack

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
        snapshot_bytes: of what is kept for `fall_back`, beside `nbytes`.
    """

    __slots__ = ("_kept", "_nbytes", "_returns_to", "cache", "layers", "position", "snapshot_bytes", "spoiled")

    def __init__(self, layers: LayerRange, cache: DynamicCache) -> None:
        self.layers = layers
        self.position = 0
        self.cache = cache
        self.spoiled = False
        self.snapshot_bytes = 0
        self._nbytes: int | None = None
        self._returns_to: int | None = None  # the earliest position that it may fall back to; None for nowhere
        self._kept: dict[int, Any] = {}  # slots as they were there, of those that cannot be cut back

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

    @torch.inference_mode()
    def copied(self, position: int | None = None) -> SessionState:
        """A state of its own, storage and all, of the first ``position`` positions; None for all of them.

        Takes the time to copy the bytes. This one stays as it is, and may be copied by several threads at once.

        Raises:
            ValueError: ``position`` lies beyond this state's, or before it where it cannot be cut back.
        """
        position = self.position if position is None else position
        if position != self.position and not (0 < position < self.position and self.cuts_back()):
            raise ValueError(f"a state of {self.position} positions cannot be made one of {position}")
        cache = self.cache
        if position < self.position:
            cache = _with_tensors(cache, lambda tensor: tensor)  # slots of its own; cropping them writes to no tensor
            cache.crop(position - self.position)
        taken = SessionState(self.layers, _with_tensors(cache, _compact))
        taken.position = position
        return taken

    def begin_from(self, held: SessionState, position: int) -> None:
        """Become a copy of the first ``position`` positions of ``held``, a state of the same layers; see `copied`."""
        if self.position or held.layers != self.layers:
            raise ValueError(f"layers {self.layers} at position {self.position} cannot begin from {held.layers}")
        self.cache = held.copied(position).cache
        self.position = position
        self._nbytes = None

    def way_back(self, positions: int) -> FallBack | None:
        """How a state that may come to ``positions`` falls back after a verify frame; None where it cannot.

        Nothing is known of what a cache class of a family's own holds beside its slots.
        """
        if type(self.cache) is not DynamicCache:
            return None
        return FallBack.ANYWHERE if self.cuts_back(positions) else FallBack.BEGIN

    @torch.inference_mode()
    def keep_way_back(self, count: int) -> None:
        """Before a frame of ``count`` positions: from now on the state may `fall_back` to where it stands.

        Slots that could not be cut back after that are copied.
        """
        end = self.position + count
        slots = self.cache.layers
        self._kept = {at: _copied_slot(slot) for at, slot in enumerate(slots) if not _cuts_back(slot, end)}
        self._returns_to = self.position
        self.snapshot_bytes = sum(tensor.untyped_storage().nbytes() for tensor in walk_tensors(self._kept))

    def let_go_of_way_back(self) -> None:
        """What the state holds now is right: it need not fall back any more."""
        self._kept, self._returns_to, self.snapshot_bytes = {}, None, 0

    @property
    def has_way_back(self) -> bool:
        """Whether the last frame may have been wrong in part, and something is kept for that."""
        return self._returns_to is not None

    def falls_back_to(self, position: int) -> bool:
        """Whether `fall_back` can go there."""
        if self._returns_to is None or not self._returns_to <= position < self.position:
            return False
        return position == self._returns_to or not self._kept

    def fall_back(self, position: int) -> None:
        """Become the state of the first ``position`` positions again, where `keep_way_back` stood or after that.

        Raises:
            ValueError: nothing was kept for that, or slots can only go back to where it stood.
        """
        if not self.falls_back_to(position):
            raise ValueError(f"a state of {self.position} positions cannot fall back to {position}")
        slots: list[Any] = self.cache.layers
        for at, slot in enumerate(slots):
            if at in self._kept:
                slots[at] = self._kept[at]
            else:
                slot.crop(position - self.position)
        self.position, self._nbytes = position, None
        self.let_go_of_way_back()

    def cuts_back(self, positions: int | None = None) -> bool:
        """Whether the state can be cut back to any earlier position, now or once it has come to ``positions``.

        Asked of the kinds of the cache's slots: attention over everything can. Conv and recurrent states cannot, since
        what made them is gone, nor can a sliding window that has slid. A cache class of a family's own holds more than
        slots, of which nothing is known.
        """
        positions = self.position if positions is None else positions
        return type(self.cache) is DynamicCache and all(_cuts_back(layer, positions) for layer in self.cache.layers)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor the cache object holds, in a stable order."""
        return iter(walk_tensors(self.cache))


def walk_tensors(holder: object) -> list[torch.Tensor]:
    """Every tensor in an object's attributes, lists, tuples and dicts, at any nesting up to eight deep."""
    found: list[torch.Tensor] = []
    _collect(holder, found, 0)
    return found


def _cuts_back(layer: object, positions: int) -> bool:
    if isinstance(layer, LinearAttentionCacheLayerMixin) or not getattr(layer, "is_croppable", False):
        return False
    return not getattr(layer, "is_sliding", False) or positions < getattr(layer, "sliding_window", 0)


def _with_tensors(cache: DynamicCache, made_of: Callable[[torch.Tensor], torch.Tensor]) -> DynamicCache:
    """A cache object of the same shape, each tensor in it replaced by what is made of it."""
    # deepcopy takes what the memo holds instead of copying it
    return copy.deepcopy(cache, {id(tensor): made_of(tensor) for tensor in walk_tensors(cache)})


def _copied_slot(slot: Any) -> Any:
    return copy.deepcopy(slot, {id(tensor): _compact(tensor) for tensor in walk_tensors(slot)})


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with storage for itself alone: a view keeps all of a longer tensor alive."""
    return tensor.clone(memory_format=torch.contiguous_format)


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
