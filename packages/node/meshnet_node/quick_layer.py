"""A decoder layer as most families have it, with as few calls as it takes.

    hidden ── norm ── q, k, v ── rope ── attention ── output ── + ── norm ── gate, up ── down ── +

transformers' own layer makes the same sums in some sixty operations and twenty calls of modules: for a single position
on a CPU a third of the time, beside products whose weights have to be read anyway. Here they are made in the same order
and rounded at the same places, so that results have the same bits, as far as products of joined weights give them.
Which families have this form :mod:`meshnet_node.family_support` says; of those, layers that hold something not known
here stay as they are. Knows no frames and no files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from meshnet_node.joined_linear import joined

Attend = Callable[..., tuple[torch.Tensor, Any]]
"""An attention function of transformers: module, queries, keys, values, mask, and ``scaling``; gives ``[rows, count,
heads, width]`` first."""

_LAYER_PARTS = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
_ATTENTION_PARTS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_HEAD_NORMS = frozenset({"q_norm", "k_norm"})
_MLP_PARTS = frozenset({"gate_proj", "up_proj", "down_proj", "act_fn"})


def quicken(base: Any, attn_implementation: str | None) -> None:
    """Put quick modules in the place of a model's decoder layers, rope and last norm, if all layers have this form.

    Args:
        base: the module that has ``layers`` and ``rotary_emb``, filled, without gradients; weights that are joined are
            held once, by the new modules.
        attn_implementation: the model's; quick layers are for ``sdpa`` alone.
    """
    if attn_implementation == "sdpa" and all(map(_has_the_form, base.layers)):
        # Names and not modules are listed: a list would keep every layer's own weights until the last is joined.
        for name in [name for name, _ in base.layers.named_children()]:
            base.layers.register_module(name, QuickLayer(base.layers.get_submodule(name)))
        base.rotary_emb = QuickRope(base.rotary_emb)
        if not isinstance(base.norm, nn.Identity):
            base.norm = RmsNorm(base.norm)


def attention_of(config: Any) -> Attend:
    """The function that a config names."""
    found: Attend = ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
    return found


def are_quick(base: Any) -> bool:
    """Whether :func:`quicken` did so."""
    return isinstance(getattr(base, "rotary_emb", None), QuickRope)


class QuickRope(nn.Module):
    """Rope's cosines and sines as quick layers take them, once for all layers.

    Args:
        rope: transformers' own.
    """

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.rope = rope

    def forward(self, inputs: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both ``[rows, count, 1, head_dim]``; of the sines the first half is negated."""
        cos, sin = self.rope(inputs, position_ids=position_ids)
        half = sin.shape[-1] // 2
        return cos.unsqueeze(2), torch.cat([-sin[..., :half], sin[..., half:]], dim=-1).unsqueeze(2)


class RmsNorm(nn.Module):
    """What transformers' norms of this form give, bit for bit; takes over their weight.

    Args:
        norm: has a ``weight`` ``[width]`` and a ``variance_epsilon``.
    """

    weight: nn.Parameter

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps: float = norm.variance_epsilon
        self.shape = tuple(self.weight.shape)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` -> the same; rounded to its dtype before the weight and after it."""
        return functional.rms_norm(inputs, self.shape, None, self.eps).mul_(self.weight)

    __call__ = forward  # here and below: nobody hangs hooks on it, and to look for them takes time


class QuickLayer(nn.Module):
    """Stands where a decoder layer of transformers stood, and is called as that was."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(layer.get_submodule("input_layernorm"))
        self.self_attn = QuickAttention(layer.get_submodule("self_attn"))
        self.post_attention_layernorm = RmsNorm(layer.get_submodule("post_attention_layernorm"))
        mlp = layer.get_submodule("mlp")
        self.mlp = QuickMlp(mlp) if _parts(mlp) == _MLP_PARTS else mlp  # of experts: as it is
        self._own: tuple[Any, ...] = ()

    def settle(self) -> None:
        """Note the modules that this is made of; they are not exchanged for others from now on."""
        self.self_attn.settle()
        if isinstance(self.mlp, QuickMlp):
            self.mlp.settle()
        self._own = (self.input_layernorm, self.self_attn, self.post_attention_layernorm, self.mlp)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: Any = None,
        attend: Attend | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """``[rows, count, hidden]`` -> the same.

        Args:
            hidden_states: not changed.
            attention_mask: as transformers makes it; None where every position may see all that its cache gives, or
                all before itself.
            position_embeddings: what :class:`QuickRope` gives.
            cache: with a slot for this layer, at its ``layer_idx``; or None.
            attend: how; None for as the config says, which takes a while to find out.
        """
        if position_embeddings is None:
            raise TypeError("a decoder layer of this form takes position_embeddings")
        norm, attention, second_norm, mlp = self._own
        hidden = attention(norm(hidden_states), attention_mask, position_embeddings, cache, attend)
        hidden.add_(hidden_states)
        out: torch.Tensor = mlp(second_norm(hidden))
        return out.add_(hidden)


class QuickAttention(nn.Module):
    """Attention with rope over whole heads; queries, keys and values are one product. Called with its hooks.

    Attributes:
        layer_idx: of its slot in a cache.
        config, num_key_value_groups, is_causal, scaling: what transformers' attention functions look at.
        heads, key_heads, width: how many of queries and of keys, and how wide each is.
        turns: whether rope is applied.
        eps: of the norms of heads; None where there are none.
        of_chunk: attention of several positions: queries, keys, values, mask, scaling; gives None for those that are
            none of its, and else what :data:`Attend` gives first.
    """

    head_norm: torch.Tensor
    of_chunk: Callable[..., torch.Tensor | None] | None = None

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        own: Any = attention
        self.config = own.config
        self.layer_idx: int = own.layer_idx
        self.num_key_value_groups: int = own.num_key_value_groups
        self.is_causal: bool = own.is_causal
        self.scaling: float = own.scaling
        self.width: int = own.head_dim
        self.heads: int = own.q_proj.out_features // own.head_dim
        self.key_heads: int = own.k_proj.out_features // own.head_dim
        self.turns: bool = getattr(own, "use_rope", True)
        self.qkv_proj = joined([own.q_proj, own.k_proj, own.v_proj])
        self.o_proj = own.o_proj
        norms = [getattr(own, name, None) for name in ("q_norm", "k_norm")]
        self.eps: float | None = None if norms[0] is None else norms[0].variance_epsilon
        weight = None if self.eps is None else _for_heads(norms, (self.heads, self.key_heads))
        self.register_buffer("head_norm", weight, persistent=False)
        self._own: tuple[Any, ...] = ()

    def settle(self) -> None:
        """See :class:`QuickLayer`."""
        self._own = (self.qkv_proj, self.o_proj)

    def forward(
        self,
        normed: torch.Tensor,
        attention_mask: torch.Tensor | None,
        turns: tuple[torch.Tensor, torch.Tensor],
        cache: Any,
        attend: Attend | None,
    ) -> torch.Tensor:
        """``[rows, count, hidden]`` -> the same, a tensor of its own."""
        rows, count, _ = normed.shape
        width, queries, turning = self.width, self.heads, self.heads + self.key_heads
        project, project_out = self._own
        heads = project(normed).view(rows, count, -1, width)
        turned = heads[:, :, :turning]
        if self.eps is not None:
            turned = functional.rms_norm(turned, (width,), None, self.eps).mul_(self.head_norm)
        if self.turns:
            turned = _turn(turned, *turns)
        query = turned[:, :, :queries].transpose(1, 2)
        key, value = turned[:, :, queries:].transpose(1, 2), heads[:, :, turning:].transpose(1, 2)
        if cache is not None:
            key, value = cache.layers[self.layer_idx].update(key, value)
        found = None
        if count > 1 and self.of_chunk is not None:
            found = self.of_chunk(query, key, value, attention_mask, self.scaling)
        if found is None:
            attend = attention_of(self.config) if attend is None else attend
            found, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling)
        out: torch.Tensor = project_out(found.reshape(rows, count, -1))
        return out


class QuickMlp(nn.Module):
    """``down(act(gate(x)) * up(x))``; gate and up are one product."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        own: Any = mlp
        self.act_fn = own.act_fn
        self.gate_up_proj = joined([own.gate_proj, own.up_proj])
        self.down_proj = own.down_proj
        self._own: tuple[Any, ...] = ()

    def settle(self) -> None:
        """See :class:`QuickLayer`."""
        self._own = (self.gate_up_proj, self.act_fn, self.down_proj)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` -> the same, a tensor of its own."""
        project, act, project_out = self._own
        gate, up = project(inputs).chunk(2, dim=-1)
        out: torch.Tensor = project_out(act(gate).mul_(up))
        return out

    __call__ = forward


def _turn(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rope, ``[rows, count, heads, head_dim]``: an entry of the first half and one of the second, as a pair, turned."""
    return (heads * cos).add_(heads.roll(heads.shape[-1] // 2, -1).mul_(sin))


def _for_heads(norms: list[Any], heads: tuple[int, int]) -> torch.Tensor:
    """Weights of the norms of queries and keys, a row for each head: ``[heads, head_dim]``."""
    return torch.cat([norm.weight.detach().expand(count, -1) for norm, count in zip(norms, heads, strict=True)])


def _parts(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in module.named_children())


def _has_the_form(layer: nn.Module) -> bool:
    """Whether a layer of a family of this form holds what is known here and nothing else."""
    if _parts(layer) != _LAYER_PARTS:
        return False
    attention = _parts(layer.get_submodule("self_attn"))
    return attention == _ATTENTION_PARTS or attention == _ATTENTION_PARTS | _HEAD_NORMS
