"""Weights of a CPU's 16-bit products, laid out once as the product reads them.

torch multiplies a bfloat16 matrix as it lies in the checkpoint, and its library (oneDNN) rearranges it in every call:
for a single position that costs as much as the product. Here the rearranged matrix takes the other's place: no second
copy is kept, and results have the same bits. Knows modules only: no families, no files.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from meshnet_node.device_choice import cpu_has_bfloat16

_LEAST_ELEMENTS = 1 << 14
"""Below, what a call costs outweighs the product."""


class PackedLinear(nn.Module):
    """An ``nn.Linear`` for inference on a CPU, in bfloat16.

    Args:
        weight: ``[out_features, in_features]``, bfloat16; the caller lets go of it.
        bias: ``[out_features]``, or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` -> ``[..., out_features]``."""
        if not inputs.is_contiguous():
            inputs = inputs.contiguous()  # the kernel reads rows as if they had no gaps between them
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, "none", [], "")
        return product

    __call__ = forward  # nobody hangs hooks on it, and looking for them costs a tenth of a small product

    def extra_repr(self) -> str:
        """For people."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def can_pack() -> bool:
    """Whether this machine's CPU multiplies bfloat16 natively and torch packs weights for it."""
    return bool(torch._C._has_mkldnn) and cpu_has_bfloat16()


def pack_linears(model: nn.Module, *, keep: frozenset[str] = frozenset()) -> None:
    """Replace, one after the other, every bfloat16 ``nn.Linear`` of ``model`` on a CPU that is large enough.

    Args:
        model: without gradients. A weight that another module uses too, as a tied embedding does, stays as it is.
        keep: names of attributes whose module stays, since the model reads its weight itself.
    """
    if not can_pack():
        return
    uses = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    # Names and not modules are listed: a list would keep every plain matrix until the last is packed.
    for parent in [module for module in model.modules() if type(module) is not nn.Linear]:
        for name in [name for name, module in parent.named_children() if type(module) is nn.Linear]:
            linear = parent.get_submodule(name)
            weight, bias = linear.get_parameter("weight"), linear._parameters["bias"]
            if name not in keep and _packs(weight, uses):
                setattr(parent, name, PackedLinear(weight.detach(), bias))


def _packs(weight: torch.Tensor, uses: Counter[int]) -> bool:
    large = weight.numel() >= _LEAST_ELEMENTS
    return large and weight.device.type == "cpu" and weight.dtype is torch.bfloat16 and uses[id(weight)] == 1
