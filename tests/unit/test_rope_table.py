"""Rope's table against the rope of quick layers that it is made from, and how much of it is kept."""

from __future__ import annotations

import copy
import ctypes
from typing import Any

import pytest
import torch

from meshnet_node import rope_table
from meshnet_node.quick_layer import QuickRope
from meshnet_node.rope_table import RopeTable
from shard_routes import Models
from tiny_models import num_layers

LIKE = torch.zeros(1, 1, dtype=torch.bfloat16)


def rope_of(models: Models, family: str) -> QuickRope:
    rope: QuickRope = models.shard(family, 0, num_layers(family)).whole_view()._base.rotary_emb
    return rope


@pytest.mark.parametrize("family", ["llama", "smollm3"])
def test_ropes_table_is_rope(family: str, models: Models) -> None:
    rope = rope_of(models, family)
    table = RopeTable(rope, LIKE)
    positions = [1, rope_table.BLOCK - 1, rope_table.BLOCK, 5, 3 * rope_table.BLOCK + 7]
    given = table.at(positions)
    for position, addresses in zip(positions, given, strict=True):
        expected = rope(LIKE, torch.tensor([[position]]))
        for tensor, address in zip(expected, addresses, strict=True):
            own = torch.frombuffer(bytearray(ctypes.string_at(address, tensor.nbytes)), dtype=torch.bfloat16)
            assert torch.equal(own, tensor.flatten())


def test_a_table_keeps_so_many_blocks(models: Models) -> None:
    table = RopeTable(rope_of(models, "llama"), LIKE)
    table.at([5])
    for number in range(1, rope_table.MOST_BLOCKS + 3):
        table.at([number * rope_table.BLOCK, 5])
    assert len(table._blocks) == rope_table.MOST_BLOCKS
    assert {0, 1, rope_table.MOST_BLOCKS + 2} & table._blocks.keys() == {0, rope_table.MOST_BLOCKS + 2}


def test_rope_that_depends_on_the_length_is_made_for_each_step(models: Models) -> None:
    rope: Any = copy.deepcopy(rope_of(models, "llama"))
    rope.rope.rope_type = "dynamic"
    table = RopeTable(rope, LIKE)
    asked: list[list[int]] = []
    rope.register_forward_pre_hook(lambda _module, arguments: asked.append(arguments[1].flatten().tolist()))
    table.at([4, 300])
    table.at([5])
    assert asked == [[4], [300], [5]]
