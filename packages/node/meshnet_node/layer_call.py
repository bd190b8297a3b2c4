"""How a model calls its decoder layers for one position: which tensors, and what else, in a form that can be compared.

Families give their layers different arguments; what a compiled layer takes is found by looking at calls of the plain
one. Pure; knows no families.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from transformers.cache_utils import Cache

from meshnet_core.errors import UnsupportedModelError

_TENSOR, _CACHE, _FUNCTION = "<tensor>", "<cache>", "<function>"


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call, its tensors set apart.

    Attributes:
        form: arguments and keywords, with names in the place of tensors, functions and the cache.
        tensors: in the order of their places.
    """

    form: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> LayerCall:
        """Take a call apart.

        Raises:
            UnsupportedModelError: an argument that is no tensor, cache, function, plain value, or tuple, list or
                dict of them.
        """
        tensors: list[torch.Tensor] = []
        form = (_form(tuple(arguments), tensors), _form(keywords, tensors))
        return cls(form, tuple(tensors))

    def with_tensors(self, tensors: Sequence[torch.Tensor], cache: Cache) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keywords of a like call; a function, such as how to attend, is left to the layer itself."""
        left = iter(tensors)
        arguments, keywords = (_filled(part, left, cache) for part in self.form)
        return arguments, keywords

    def like(self, other: LayerCall) -> bool:
        """Whether ``other`` differs in the tensors' values at most."""
        shapes = [[(t.shape, t.dtype, t.device) for t in call.tensors] for call in (self, other)]
        return self.form == other.form and shapes[0] == shapes[1]


def _form(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _TENSOR
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Cache):
        return _CACHE
    if isinstance(value, FunctionType):
        return _FUNCTION
    if isinstance(value, Mapping):
        return ("dict", tuple((name, _form(each, tensors)) for name, each in value.items()))
    if isinstance(value, tuple | list):
        return ("tuple", tuple(_form(each, tensors) for each in value))
    raise UnsupportedModelError(f"its layers are given a {type(value).__name__}, which a compiled layer cannot take")


def _filled(form: Any, left: Any, cache: Cache) -> Any:
    if isinstance(form, tuple):
        kind, parts = form
        if kind == "dict":
            return {name: _filled(each, left, cache) for name, each in parts}
        return tuple(_filled(each, left, cache) for each in parts)
    if form == _TENSOR:
        return next(left)
    if form == _CACHE:
        return cache
    return None if form == _FUNCTION else form
