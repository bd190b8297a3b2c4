"""The states of several sessions as one cache object, for one forward over the newest position of each of them.

A model runs rows of one position each, ``[sessions, 1, hidden]``; its products see them all at once. Attention and
state stay each session's own, and nothing is padded to the longest:

    layer       the model writes                         and gets
    attention   keys, values [sessions, heads, 1, dim]   a `Ragged` of each: what every session's own layer gave back
    linear      conv and recurrent states, stacked       the same, stacked; `give_back` hands the rows to their sessions
    apart       nothing: what runs there takes each session's own layer (`RaggedCache.rows_of`)

What takes a `Ragged` in a tensor's place is :mod:`meshnet_node.ragged_attention`. Knows no model and no frame.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)


class Ragged(tuple[torch.Tensor, ...]):
    """Keys or values of several sessions, each ``[1, heads, its own length, dim]``. Not a tensor: what takes it for one
    fails."""

    __slots__ = ()


def can_be_ragged(cache: DynamicCache) -> bool:
    """Whether sessions whose caches have this one's kinds of slots can run together.

    Refused are layers that hold attention and linear states at once, what no class here knows, and caches that hold
    more than their slots.
    """
    return type(cache) is DynamicCache and all(_kind_is_known(layer) for layer in cache.layers)


def _kind_is_known(layer: object) -> bool:
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return type(layer) is LinearAttentionLayer
    return isinstance(layer, (DummyLayer, DynamicLayer)) and not hasattr(layer, "update_indexer")


class RaggedCache(DynamicCache):
    """A cache of several sessions' newest positions.

    Args:
        caches: of each session, in the order of the rows; not empty, of the same layers, each past its first position.
            Attention layers are written to as the forward goes, linear ones by :meth:`give_back`.
        apart: linear layers that are not stacked.
    """

    def __init__(self, caches: Sequence[DynamicCache], apart: Collection[int] = ()) -> None:
        super().__init__()
        self._caches = tuple(caches)
        self.layers = [
            _Apart() if index in apart else _row_layer(rows)
            for index, rows in enumerate(zip(*(cache.layers for cache in caches), strict=True))
        ]

    def rows_of(self, index: int) -> tuple[Any, ...]:
        """Every session's own layer, in the order of the rows, of one that is not stacked; none of another."""
        return tuple(cache.layers[index] for cache in self._caches) if type(self.layers[index]) is _Apart else ()

    def give_back(self) -> None:
        """Hand the rows of linear layers to their sessions, once the forward has finished."""
        for index, stacked in enumerate(self.layers):
            if type(stacked) is LinearAttentionLayer:
                for row, cache in enumerate(self._caches):
                    _copy_row(stacked, row, cache.layers[index])


class _RaggedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One attention layer of every session."""

    def __init__(self, rows: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows = rows
        self.is_initialized = True

    def update(  # type: ignore[override] # a model hands on what it gets, unseen
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Ragged, Ragged]:
        given = [
            layer.update(key_states[row : row + 1], value_states[row : row + 1], *args, **kwargs)
            for row, layer in enumerate(self._rows)
        ]
        return Ragged(keys for keys, _ in given), Ragged(values for _, values in given)


class _Apart(LinearAttentionLayer):
    """Stands for one layer of every session; holds nothing, so that a module that asks it for state fails."""

    def update_conv_state(self, *_: Any, **__: Any) -> torch.Tensor:
        raise TypeError("the sessions' states are their own in this layer")

    def update_recurrent_state(self, *_: Any, **__: Any) -> torch.Tensor:
        raise TypeError("the sessions' states are their own in this layer")


def _row_layer(rows: Sequence[Any]) -> Any:
    first = rows[0]
    if isinstance(first, LinearAttentionLayer):
        return _stacked(rows)
    return first if isinstance(first, DummyLayer) else _RaggedLayer(rows)


def _stacked(rows: Sequence[LinearAttentionLayer]) -> LinearAttentionLayer:
    """A linear layer of as many rows, with copies of their states, each in the dtype it has."""
    first = rows[0]
    stacked = LinearAttentionLayer(number_of_states=first.number_of_states)
    stacked.dtype, stacked.device = first.dtype, first.device
    stacked.conv_kernel_size = dict(first.conv_kernel_size)
    for own, theirs in _states(stacked, rows):
        for index in own:
            tensors = [states[index] for states in theirs]
            own[index] = None if tensors[0] is None else torch.cat(tensors)
    for index in range(first.number_of_states):
        stacked.is_conv_states_initialized[index] = stacked.conv_states[index] is not None
        stacked.is_recurrent_states_initialized[index] = stacked.recurrent_states[index] is not None
        stacked.has_previous_state[index] = first.has_previous_state[index]
    return stacked


def _copy_row(stacked: LinearAttentionLayer, row: int, layer: Any) -> None:
    for own, (theirs,) in _states(stacked, [layer]):
        for index, tensor in own.items():
            if tensor is not None:
                theirs[index].copy_(tensor[row : row + 1])


def _states(stacked: LinearAttentionLayer, rows: Sequence[Any]) -> list[tuple[Any, list[Any]]]:
    """Both kinds of state by number: the stacked layer's dict, and those of the rows."""
    return [
        (stacked.conv_states, [row.conv_states for row in rows]),
        (stacked.recurrent_states, [row.recurrent_states for row in rows]),
    ]
