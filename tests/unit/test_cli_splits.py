"""How layers are divided among nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet_cli.splits import check_cover, even_split, parse_splits
from meshnet_core.errors import InvalidInputError
from meshnet_core.layer_range import LayerRange


@given(st.integers(1, 200), st.integers(1, 200))
def test_an_even_split_covers_each_layer_once_and_lengths_differ_by_one_at_most(num_layers: int, nodes: int) -> None:
    if nodes > num_layers:
        with pytest.raises(InvalidInputError, match=f"1 to {num_layers} nodes"):
            even_split(num_layers, nodes)
        return
    ranges = even_split(num_layers, nodes)
    assert [layer for layers in ranges for layer in range(layers.start, layers.stop)] == list(range(num_layers))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_splits_are_read_inclusive_and_may_overlap() -> None:
    splits = parse_splits("0-19, 10-29")
    assert splits == (LayerRange(0, 20), LayerRange(10, 30))
    check_cover(splits, 30)


@pytest.mark.parametrize("text", ["", "0-14,", "0-14;15-29", "a-b", "14-0", "0-14 15-29"])
def test_what_is_no_list_of_ranges_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"range|backwards"):
        parse_splits(text)


def test_missing_layers_are_named() -> None:
    with pytest.raises(InvalidInputError, match=r"leave out layers 3-5, 9 of 0-9"):
        check_cover(parse_splits("0-2,6-8"), 10)


def test_layers_beyond_the_model_are_named() -> None:
    with pytest.raises(InvalidInputError, match=r"15-30 reaches beyond the model's layers 0-29"):
        check_cover(parse_splits("0-14,15-30"), 30)
