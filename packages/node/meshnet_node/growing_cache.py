"""Cache slots of attention layers that write new positions in place instead of copying the old ones for each token.

transformers' dynamic slots concatenate: every step copies all keys and values of the session, in every layer. These
hold them in tensors with room to spare behind the last position,

    room   [k k k k k . .]      keys is a view of the first five; a step writes one row and makes the view longer

and copy them only when that is full, to one with a sixteenth more: each position is copied some sixteen times in all,
however long the session. A sliding window is a view that moves through such a tensor. Cutting back makes the view
shorter. Knows nothing of sessions or of what is held for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

_SPARE = 16


def rows_for(positions: int) -> int:
    """The most rows that a slot holds memory for when it has come to ``positions`` and was never cut back."""
    return positions + positions // _SPARE


def let_grow(cache: DynamicCache) -> DynamicCache:
    """``cache``, still empty, with the slots that concatenate replaced; those of other kinds stay as they are."""
    cache.layers = [_growing(layer) for layer in cache.layers]
    return cache


def _growing(layer: Any) -> Any:
    if type(layer) is DynamicLayer:
        return GrowingLayer()
    if type(layer) is DynamicSlidingWindowLayer:
        return GrowingWindowLayer(layer.sliding_window)
    if type(layer) is LinearAttentionAndFullAttentionLayer:
        return GrowingHybridLayer(layer.number_of_states)
    if type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
        return GrowingHybridWindowLayer(layer.sliding_window, layer.number_of_states)
    return layer


class _Room:
    """The tensor that a slot's keys, or values, are a view of, and may be made longer in.

    Not copied with the slot: what copies a cache makes compact tensors of the views, and one room is written by one
    slot alone. It has no ``__dict__``, so that who looks for a cache's tensors finds the view, whose storage this is.
    """

    __slots__ = ("_held", "_start", "_view")

    def __init__(self) -> None:
        self._held: torch.Tensor | None = None
        self._view: torch.Tensor | None = None  # what was given last, and where in the room it begins
        self._start = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> _Room:
        return _Room()

    def append(self, before: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Positions ``before`` and ``new`` behind one another, as a view.

        Args:
            before: what this gave the last time, or a cut of its positions; or any tensor, which is then copied. One
                without four dimensions holds none.
            new: ``[batch, heads, count, head_dim]``.
        """
        held, end = self._make_room(before, new)
        held.narrow(2, end, new.shape[-2]).copy_(new)
        return self._longer(held, end + new.shape[-2])

    def reserve(self, before: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """As :meth:`append`, but nothing is written: of ``like`` only shape and dtype count."""
        held, end = self._make_room(before, like)
        return self._longer(held, end + like.shape[-2])

    def _make_room(self, before: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The tensor with ``before`` in it and room behind, and where that begins."""
        count = new.shape[-2]
        held = self._held
        if before is self._view and held is not None:
            length, start = before.shape[-2], self._start
        elif before.dim() == 4 and held is not None and _share(before, held):
            length, start = before.shape[-2], before.storage_offset() // new.shape[-1]
        else:
            length, held, start = before.shape[-2] if before.dim() == 4 else 0, None, 0
        end = start + length
        if held is None or end + count > held.shape[-2]:
            rows = rows_for(length + count)
            held = new.new_empty((*new.shape[:-2], rows, new.shape[-1]))
            if length:
                held[:, :, :length] = before
            self._held, start, end = held, 0, length
        self._start = start
        return held, end

    def _longer(self, held: torch.Tensor, end: int) -> torch.Tensor:
        self._view = held.narrow(2, self._start, end - self._start)
        return self._view

    def clear(self) -> None:
        """Let go of the tensor."""
        self._held = self._view = None


_Take = Callable[[_Room, torch.Tensor, torch.Tensor], torch.Tensor]
"""Either of a room's ways to become longer."""


def _share(before: torch.Tensor, held: torch.Tensor) -> bool:
    return before.shape[-2] > 0 and before.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()


class _Grows:
    """What the slots below have in common; goes before transformers' class, whose ``update`` it replaces."""

    keys: Any
    values: Any
    is_initialized: bool

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._key_room, self._value_room = _Room(), _Room()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in new positions, ``[batch, heads, count, head_dim]`` each; all keys and values that they may see, as
        views.
        """
        return self._taken_in(key_states, value_states, _Room.append)

    def reserve(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`update`, for who writes the new positions himself: they are the last of those given back.

        Args:
            keys, values: of which only shape and dtype count.
        """
        return self._taken_in(keys, values, _Room.reserve)

    def _taken_in(self, keys: torch.Tensor, values: torch.Tensor, take: _Take) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def _grown(self, keys: torch.Tensor, values: torch.Tensor, take: _Take) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(keys, values)  # type: ignore[attr-defined]
        return take(self._key_room, self.keys, keys), take(self._value_room, self.values, values)

    def reset(self) -> None:
        """See transformers' ``CacheLayerMixin``."""
        super().reset()  # type: ignore[misc]
        self._key_room.clear()
        self._value_room.clear()


class _GrowsWhole(_Grows):
    def _taken_in(self, keys: torch.Tensor, values: torch.Tensor, take: _Take) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = self._grown(keys, values, take)
        return self.keys, self.values


class _GrowsWindow(_Grows):
    sliding_window: int
    cumulative_length: int
    record_past: bool

    def _taken_in(self, keys: torch.Tensor, values: torch.Tensor, take: _Take) -> tuple[torch.Tensor, torch.Tensor]:
        count, kept = keys.shape[-2], self.sliding_window - 1
        keys, values = self._grown(keys, values, take)
        self.cumulative_length += count
        if not self.record_past:
            self.keys, self.values = keys[:, :, -kept:], values[:, :, -kept:]
            return keys, values
        self.keys, self.values = keys, values  # until `crop` is called, which cuts them to the window
        return keys[:, :, -(kept + count) :], values[:, :, -(kept + count) :]


class GrowingLayer(_GrowsWhole, DynamicLayer):  # type: ignore[no-untyped-call]
    """Attention over everything."""


class GrowingWindowLayer(_GrowsWindow, DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """Attention over a sliding window."""


class GrowingHybridLayer(_GrowsWhole, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, no-untyped-call, override]
    """Attention over everything, beside recurrent states."""


class GrowingHybridWindowLayer(_GrowsWindow, LinearAttentionAndSlidingWindowAttentionLayer):  # type: ignore[misc, no-untyped-call, override]
    """Attention over a sliding window, beside recurrent states."""
