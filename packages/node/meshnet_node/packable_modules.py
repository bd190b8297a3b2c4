"""Which weights of a model may be held packed: matrices of plain products and the table of embeddings.

What stays as it is: norms, biases, convolutions, small matrices, routers and gates, whose rounding would send tokens to
other experts, and what steers recurrent states. Modules of a family's own that are no plain ``nn.Linear`` stay too.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from meshnet_node.gguf_blocks import GROUP

_MIN_ROWS = 32
_GATES = frozenset({"gate", "router", "shared_expert_gate"})
_DECAYS = frozenset({"x_proj", "dt_proj", "in_proj_a", "in_proj_b", "in_proj_ba"})  # and steps, of recurrent layers


def packable_modules(model: PreTrainedModel) -> dict[str, nn.Linear | nn.Embedding]:
    """By name: the modules whose ``weight`` may be packed."""
    table = model.get_input_embeddings()
    found: dict[str, nn.Linear | nn.Embedding] = {}
    for name, module in model.named_modules():
        is_product = type(module) is nn.Linear and name.rpartition(".")[2] not in _GATES | _DECAYS
        is_table = type(module) is nn.Embedding and module is table  # subclasses do more than look up
        if isinstance(module, (nn.Linear, nn.Embedding)) and (is_product or is_table):
            rows, columns = module.weight.shape
            if rows >= _MIN_ROWS and columns % GROUP == 0:
                found[name] = module
    return found


def packable_weights(model: PreTrainedModel) -> set[str]:
    """Names of the tensors that may be kept as blocks."""
    return {f"{name}.weight" for name in packable_modules(model)}
