"""Attention of several sessions' newest positions, each over its own keys and values.

Registered with transformers under a name for each implementation that it can stand before. The model's own one runs for
one session after the other, so that whatever a family does with scores (soft caps, sinks, scales) is done here too: the
products with weights are what is worth sharing, and those a model does before and after. No mask is needed, since the
newest position may see all that its layer's cache gives it. Knows no cache and no model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from meshnet_node.cpu_attention import STEP_ATTENTION, attend
from meshnet_node.ragged_cache import Ragged

_NAMES = {"sdpa": "meshnet_ragged_sdpa", STEP_ATTENTION: "meshnet_ragged_step_sdpa", "eager": "meshnet_ragged_eager"}
"""Implementation -> the name of the one before it. No masks are registered for these, so that models make none."""


def ragged_name(implementation: str | None) -> str | None:
    """What to set as a config's attention implementation in place of ``implementation``; None where nothing can be."""
    return _NAMES.get(implementation or "eager")


def _attend(
    own: Callable[..., Any], module: nn.Module, query: torch.Tensor, key: Ragged, value: Ragged, **arguments: Any
) -> tuple[torch.Tensor, None]:
    """Attention ``[sessions, 1, heads, dim]`` of queries ``[sessions, heads, 1, dim]``."""
    if not (isinstance(key, Ragged) and isinstance(value, Ragged) and len(key) == len(value) == len(query)):
        raise TypeError("attention of several sessions takes the keys and values of each, as its cache gave them")
    rows = [
        own(module, query[row : row + 1], keys, values, None, **arguments)[0]
        for row, (keys, values) in enumerate(zip(key, value, strict=True))
    ]
    return torch.cat(rows), None


def _sdpa(
    module: nn.Module, query: torch.Tensor, key: Any, value: Any, attention_mask: None, **arguments: Any
) -> tuple[torch.Tensor, None]:
    return _attend(ALL_ATTENTION_FUNCTIONS["sdpa"], module, query, key, value, **arguments)


def _step_sdpa(
    module: nn.Module, query: torch.Tensor, key: Any, value: Any, attention_mask: None, **arguments: Any
) -> tuple[torch.Tensor, None]:
    return _attend(attend, module, query, key, value, **arguments)


def _eager(
    module: nn.Module, query: torch.Tensor, key: Any, value: Any, attention_mask: None, **arguments: Any
) -> tuple[torch.Tensor, None]:
    own = sys.modules[type(module).__module__].eager_attention_forward  # each model's file has one of its own
    return _attend(own, module, query, key, value, **arguments)


AttentionInterface.register(_NAMES["sdpa"], _sdpa)
AttentionInterface.register(_NAMES[STEP_ATTENTION], _step_sdpa)
AttentionInterface.register(_NAMES["eager"], _eager)
