"""Weights of a CPU's products, laid out once as the product reads them.

torch multiplies a matrix as it lies in the checkpoint. Its library (oneDNN) rearranges a bfloat16 one in every call,
which costs as much as the product of a single position; a float32 one goes to another library, which takes two cores
no faster than one and eight positions no cheaper than apart. Here the rearranged matrix takes the other's place: no
second copy is kept. In bfloat16 results have the same bits, in float32 they add up in another order. Knows modules
only: no families, no files.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from meshnet_node.column_layout import lies_in_columns
from meshnet_node.device_choice import cpu_has_bfloat16

MANY_ROWS = 18
"""From here on, rows are for a module's ``of_many``, if it has one; fewer are a step's."""

_LEAST_ELEMENTS = 1 << 14
"""Below, what a call costs outweighs the product."""

_LAID_FOR = 64
"""Positions that the layout is chosen for: as good for one as what is chosen for one, and much better for eight."""


class PackedLinear(nn.Module):
    """An ``nn.Linear`` for inference on a CPU, in bfloat16 or float32.

    Args:
        weight: ``[out_features, in_features]``; the caller lets go of it.
        bias: ``[out_features]``, or None.

    Attributes:
        in_columns: whether the layout is :mod:`meshnet_node.column_layout`'s.
        of_many, of_few: other products for many rows, and for a step's, ``[..., in_features]`` without gaps between
            them; they give None for those that are none of theirs.
    """

    of_many: Callable[[torch.Tensor], torch.Tensor | None] | None = None
    of_few: Callable[[torch.Tensor], torch.Tensor | None] | None = None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(laid_out(weight), requires_grad=False)
        self.in_columns = _is_in_columns(self.weight, weight)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` -> ``[..., out_features]``."""
        if not inputs.is_contiguous():
            inputs = inputs.contiguous()  # the kernel reads rows as if they had no gaps between them
        other = self.of_many if inputs.dim() > 1 and inputs.shape[-2] >= MANY_ROWS else self.of_few
        if other is not None and (found := other(inputs)) is not None:
            return found
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, "none", [], "")
        return product

    def product_of_few(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """:meth:`forward` for dense rows, ``[n, in_features]``; holds the tensors, whatever becomes of the module."""
        weight, bias, product = self.weight, self.bias, torch.ops.mkldnn._linear_pointwise.default
        return lambda inputs: product(inputs, weight, bias, "none", [], "")

    __call__ = forward  # nobody hangs hooks on it, and looking for them costs a tenth of a small product

    def extra_repr(self) -> str:
        """For people."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def laid_out(weight: torch.Tensor) -> torch.Tensor:
    """A copy of ``weight``, ``[out_features, in_features]``, as oneDNN's product reads it; torch's own cannot."""
    laid: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _LAID_FOR)
    return laid


_in_columns: dict[tuple[torch.dtype, torch.Size], bool] = {}


def _is_in_columns(laid: torch.Tensor, weight: torch.Tensor) -> bool:
    """The library chooses by dtype and shape, so one of each is looked at."""
    kind = weight.dtype, weight.shape
    if kind not in _in_columns:
        found = lies_in_columns(laid, weight)
        if found is None:
            return False
        _in_columns[kind] = found
    return _in_columns[kind]


def can_pack(dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether torch packs weights of ``dtype`` for this machine's CPU, an x86 one that multiplies them natively."""
    if not torch._C._has_mkldnn or platform.machine() not in {"x86_64", "AMD64"}:
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and cpu_has_bfloat16())


def pack_linears(model: nn.Module, *, keep: frozenset[str] = frozenset()) -> None:
    """Replace, one after the other, every ``nn.Linear`` of ``model`` on a CPU that is large enough and can be packed.

    Args:
        model: without gradients. A weight that another module uses too, as a tied embedding does, stays as it is.
        keep: names of attributes whose module stays, since the model reads its weight itself.
    """
    uses = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    # Names and not modules are listed: a list would keep every plain matrix until the last is packed.
    for parent in [module for module in model.modules() if type(module) is not nn.Linear]:
        for name in [name for name, module in parent.named_children() if type(module) is nn.Linear]:
            linear = parent.get_submodule(name)
            weight, bias = linear.get_parameter("weight"), linear._parameters["bias"]
            if name not in keep and uses[id(weight)] == 1 and is_worth_it(weight):
                setattr(parent, name, PackedLinear(weight.detach(), bias))


def is_worth_it(weight: torch.Tensor) -> bool:
    """Whether a matrix is on a CPU, large enough, and can be packed."""
    return weight.numel() >= _LEAST_ELEMENTS and weight.device.type == "cpu" and can_pack(weight.dtype)
