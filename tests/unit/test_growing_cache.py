"""Slots that write in place hold what transformers' own hold, and no more memory than they say."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaConfig, MistralConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from meshnet_node.growing_cache import GrowingLayer, GrowingWindowLayer, let_grow, rows_for
from meshnet_node.session_state import walk_tensors

HEADS, KEY_DIM, VALUE_DIM, WINDOW = 2, 4, 3, 7
ROW_BYTES = HEADS * (KEY_DIM + VALUE_DIM) * 4

counts = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@pytest.fixture(scope="module", autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def positions(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, HEADS, count, KEY_DIM), torch.randn(1, HEADS, count, VALUE_DIM)


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def held_bytes(layer: Any) -> int:
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in layer_tensors(layer)
    }
    return sum(storages.values())


def layer_tensors(layer: Any) -> list[torch.Tensor]:
    return [tensor for tensor in walk_tensors(layer) if tensor.dim() == 4]


@given(st.lists(st.integers(-12, 40).filter(bool), min_size=1, max_size=30))
def test_it_holds_what_a_concatenating_slot_holds(steps: list[int]) -> None:
    """Positive: positions taken in; negative: positions cut off."""
    growing, dynamic, most = GrowingLayer(), DynamicLayer(), 0
    for step in steps:
        if step < 0:
            cut = min(-step, dynamic.get_seq_length())
            growing.crop(-cut)
            dynamic.crop(-cut)
        else:
            new = positions(step)
            assert same(growing.update(*new), dynamic.update(*new))
        most = max(most, dynamic.get_seq_length())
        assert growing.get_seq_length() == dynamic.get_seq_length()
        assert growing.get_mask_sizes(3) == dynamic.get_mask_sizes(3)
        assert held_bytes(growing) <= rows_for(most) * ROW_BYTES


@pytest.mark.parametrize("record_past", [False, True])
@given(steps=counts, cuts=st.lists(st.integers(0, 3), min_size=30, max_size=30))
def test_a_window_holds_what_a_concatenating_window_holds(record_past: bool, steps: list[int], cuts: list[int]) -> None:
    growing, dynamic = GrowingWindowLayer(WINDOW), DynamicSlidingWindowLayer(WINDOW)
    growing.record_past = dynamic.record_past = record_past
    for step, cut in zip(steps, cuts, strict=False):
        assert growing.get_mask_sizes(step) == dynamic.get_mask_sizes(step)
        new = positions(step)
        assert same(growing.update(*new), dynamic.update(*new))
        if record_past:
            growing.crop(-min(cut, step))
            dynamic.crop(-min(cut, step))
        assert same((growing.keys, growing.values), (dynamic.keys, dynamic.values))
        assert growing.get_seq_length() == dynamic.get_seq_length()
        assert held_bytes(growing) <= rows_for(WINDOW + max(steps)) * ROW_BYTES


def test_a_step_copies_no_earlier_position_until_the_room_is_full() -> None:
    layer, count = GrowingLayer(), 320
    place = layer.update(*positions(count))[0].data_ptr()
    for _ in range(count // 16):
        assert layer.update(*positions(1))[0].data_ptr() == place
    assert layer.update(*positions(1))[0].data_ptr() != place


def test_copies_and_the_slot_they_were_made_of_write_apart() -> None:
    layer = GrowingLayer()
    layer.update(*positions(64))
    layer.update(*positions(1))
    views = {id(tensor): tensor for tensor in layer_tensors(layer)}
    shorter = copy.deepcopy(layer, dict(views))  # shares the tensors until it takes in a position of its own
    shorter.crop(-20)
    kept = layer.keys.clone()
    shorter.update(*positions(5))
    assert torch.equal(layer.keys, kept)
    again = copy.deepcopy(layer, {key: tensor.clone() for key, tensor in views.items()})
    assert torch.equal(again.keys, kept)
    again.update(*positions(1))
    layer.update(*positions(1))
    assert torch.equal(layer.keys[:, :, :65], again.keys[:, :, :65])
    assert not torch.equal(layer.keys, again.keys)


def test_a_slot_that_was_reset_begins_anew_and_holds_nothing() -> None:
    for layer in (GrowingLayer(), GrowingWindowLayer(WINDOW)):
        layer.update(*positions(9))
        layer.reset()
        assert held_bytes(layer) == 0
        assert layer.get_seq_length() == 0
        new = positions(2)
        assert same(layer.update(*new), new)


def test_slots_that_concatenate_are_replaced_and_no_others() -> None:
    small = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    full = let_grow(DynamicCache(config=LlamaConfig(**small)))
    assert [type(layer) for layer in full.layers] == [GrowingLayer] * 2
    sliding = let_grow(DynamicCache(config=MistralConfig(**small, sliding_window=WINDOW)))
    assert [(type(layer), layer.sliding_window) for layer in sliding.layers] == [(GrowingWindowLayer, WINDOW)] * 2
    linear = let_grow(DynamicCache(config=LlamaConfig(**small, layer_types=["linear_attention", "full_attention"])))
    assert [type(layer).__name__ for layer in linear.layers] == ["LinearAttentionLayer", "GrowingLayer"]
