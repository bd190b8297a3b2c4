"""Which weights of a model may be held packed: matrices of plain products, experts, and the table of embeddings.

What stays as it is: norms, biases, convolutions, small matrices, routers and gates, whose rounding would send tokens to
other experts, and what steers recurrent states. Modules of a family's own that are no plain ``nn.Linear`` stay too.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from meshnet_node.gguf_blocks import GROUP
from meshnet_node.packed_experts import EXPERT_WEIGHTS, is_packable

_MIN_ROWS = 32
_GATES = frozenset({"gate", "router", "shared_expert_gate"})
_DECAYS = frozenset({"x_proj", "dt_proj", "in_proj_a", "in_proj_b", "in_proj_ba"})  # and steps, of recurrent layers


class Use(enum.Enum):
    """What a weight is for."""

    PRODUCT = "product"
    TABLE = "table"
    EXPERTS = "experts"


@dataclass(frozen=True, slots=True)
class Packable:
    """One weight that may be packed.

    Attributes:
        module: its module's name.
        weight: its own name in it.
        shape: ``[rows, columns]``, of experts with their number before.
    """

    module: str
    weight: str
    use: Use
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.module}.{self.weight}"


def unpackable_experts(model: PreTrainedModel) -> str | None:
    """The name of a module of experts that cannot be packed, if there is one."""
    packable = {weight.module for weight in packable_weights(model).values()}
    name: str
    for name, module in model.named_modules():
        holds = any(parameter.dim() == 3 for parameter in module._parameters.values() if parameter is not None)
        if holds and name not in packable and not isinstance(module, nn.Conv1d):
            return name
    return None


def packable_weights(model: PreTrainedModel) -> dict[str, Packable]:
    """By name: the weights of ``model`` that may be packed; of experts all or none."""
    table = model.get_input_embeddings()
    found: dict[str, Packable] = {}
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name.rpartition(".")[2] not in _GATES | _DECAYS:
            weights = [Packable(name, "weight", Use.PRODUCT, tuple(module.weight.shape))]
        elif type(module) is nn.Embedding and module is table:  # subclasses do more than look up
            weights = [Packable(name, "weight", Use.TABLE, tuple(module.weight.shape))]
        elif is_packable(module):
            shapes = {weight: tuple(getattr(module, weight).shape) for weight in EXPERT_WEIGHTS}
            weights = [Packable(name, weight, Use.EXPERTS, shape) for weight, shape in shapes.items()]
        else:
            continue
        if all(each.shape[-2] >= _MIN_ROWS and each.shape[-1] % GROUP == 0 for each in weights):
            found |= {each.name: each for each in weights}
    return found
