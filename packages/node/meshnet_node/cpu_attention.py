"""Attention on a CPU, in 16 bits, where heads share keys and values.

torch's kernel for the CPU multiplies one row in a slower way than several, and one row is what it gets where each head
asks alone. Here the heads that share keys and values ask together, as rows of one product: a tenth of the time for a
newest position on Qwen2.5's and Llama's shapes, with the same sums. For several positions behind others it saves the
copies of all keys and values, one for each head, which transformers makes where there is a mask. Chunks in bfloat16 go
to :mod:`meshnet_node.chunk_attention` where that is quicker, and every other case to transformers' own function. It
knows no families, and is registered under a name of its own, so that models which transformers runs stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from meshnet_node import chunk_attention
from meshnet_node.device_choice import cpu_has_bfloat16

STEP_ATTENTION = "meshnet_step_sdpa"
"""What a config calls :func:`attend`."""
_LARGEST_MASK = 1 << 22  # entries, for all rows; a larger one would cost more memory than the copies of keys and values


def use_cpu_attention(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Let the model of ``config`` attend by :func:`attend`, if it attends by ``sdpa`` and would gain."""
    if device.type == "cpu" and dtype.itemsize == 2 and config._attn_implementation == "sdpa":
        config._attn_implementation = STEP_ATTENTION


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers' ``sdpa_attention_forward`` gives.

    Args:
        module: the attention layer.
        query: ``[batch, heads, count, width]``.
        key, value: ``[batch, key_heads, positions, ...]``; ``key_heads`` divides ``heads``.
        attention_mask: None where every query may see every position, or all that come before its own.
        dropout, scaling, options: see there.

    Returns:
        ``[batch, count, heads, value_width]``, and None.
    """
    batch, heads, count, width = query.shape
    sharing = heads // key.shape[1]
    plain = not any(option is not None for option in map(options.get, _REFUSED))
    if plain and count > 1 and _sees_no_later(module, attention_mask, dropout, options):
        factor = width**-0.5 if scaling is None else scaling
        of_chunk = getattr(module, "of_chunk", None)
        if of_chunk is not None and (out := of_chunk(query, key, value, attention_mask, factor)) is not None:
            return out, None
        if _products_gain() and chunk_attention.suits(query, key, attention_mask):
            return chunk_attention.attend_chunk(query, key, value, attention_mask, factor), None
    together = attention_mask is None if count == 1 else _is_shared(attention_mask, sharing)
    if not (plain and together):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    rows = query.reshape(batch, key.shape[1], sharing * count, width)
    if attention_mask is not None:
        attention_mask = attention_mask.repeat(1, 1, sharing, 1)
    elif sharing == 1:
        rows = rows.repeat(1, 1, 2, 1)  # two of the same are still quicker than one
    found = functional.scaled_dot_product_attention(
        rows, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    found = found[:, :, : sharing * count].reshape(batch, heads, count, value.shape[-1])
    return found.transpose(1, 2).contiguous(), None


def _sees_no_later(module: torch.nn.Module, mask: torch.Tensor | None, dropout: float, options: dict[str, Any]) -> bool:
    """Whether a chunk's queries see what a mask says, or where there is none, nothing after them; and all of it."""
    is_causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return not dropout and (mask is not None or bool(causal))


def _products_gain() -> bool:
    """Whether this CPU multiplies bfloat16 natively where torch's kernel does not; with AMX that one does, too."""
    return cpu_has_bfloat16() and not torch.cpu._is_amx_tile_supported()


def _is_shared(mask: torch.Tensor | None, sharing: int) -> bool:
    """Whether heads that share keys may share a mask ``[batch, 1, count, positions]`` too, and would gain by it."""
    return mask is not None and sharing > 1 and mask.shape[1] == 1 and sharing * mask.numel() <= _LARGEST_MASK


_REFUSED = ("position_bias", "softcap")

AttentionInterface.register(STEP_ATTENTION, attend)
AttentionMaskInterface.register(STEP_ATTENTION, sdpa_mask)
