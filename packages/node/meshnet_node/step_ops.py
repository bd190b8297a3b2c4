"""What a compiled decoder layer leaves to others: two operators whose work is done by the layer that is running.

A compiled layer is one library for all layers of its kind, so it knows neither its weights' form nor its session. It
calls these; what they do is set, in this thread, for as long as one layer runs:

    step_call       a module of the layer, by its number: products of packed weights, experts
    step_attention  takes one position's keys and values into the session's slot and attends to all that it holds

Knows no models and no sessions. Nothing here is run while a layer is compiled but the shapes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import library, nn

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From query ``[batch, heads, 1, width]``, new keys and values ``[batch, key_heads, 1, ...]`` to ``[batch, 1, heads,
value_width]``."""

AS_GIVEN = 0
"""As ``width``: what the module gives is as wide as its first input."""

_OPERATORS: Any = library.Library("meshnet", "DEF")  # type: ignore[no-untyped-call]
_OPERATORS.define("step_call(Tensor[] inputs, int index, int width) -> Tensor")
_OPERATORS.define("step_attention(Tensor query, Tensor key, Tensor value) -> Tensor")


class _Running(threading.local):
    modules: Sequence[nn.Module] = ()
    attend: Attend | None = None


_running = _Running()


@contextmanager
def running(modules: Sequence[nn.Module], attend: Attend | None) -> Iterator[None]:
    """Whose modules and attention the operators mean, in this thread, within the block."""
    _running.modules, _running.attend = modules, attend
    try:
        yield
    finally:
        _running.modules, _running.attend = (), None


def _call(inputs: list[torch.Tensor], index: int, width: int) -> torch.Tensor:
    del width
    result: torch.Tensor = _running.modules[index](*inputs)
    return result


def _call_shape(inputs: list[torch.Tensor], index: int, width: int) -> torch.Tensor:
    del index
    first = inputs[0]
    return first.new_empty((*first.shape[:-1], width if width != AS_GIVEN else first.shape[-1]))


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if _running.attend is None:
        raise RuntimeError("attention of a compiled layer was called while none was running")
    return _running.attend(query, key, value)


def _attention_shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    del key
    batch, heads, count, _ = query.shape
    return query.new_empty((batch, count, heads, value.shape[-1]))


# On every device alike; compiled code passes dense tensors and takes the results as the shapes below have them.
_OPERATORS.impl("step_call", _call, "CompositeExplicitAutograd")
_OPERATORS.impl("step_attention", _attention, "CompositeExplicitAutograd")
library.register_fake("meshnet::step_call", _call_shape, lib=_OPERATORS)
library.register_fake("meshnet::step_attention", _attention_shape, lib=_OPERATORS)
