"""How layers are divided among nodes."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet_cli.splits import check_cover, even_split
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


@given(st.integers(1, 24), st.integers(1, 6), st.data())
def test_where_a_model_can_be_cut_at_some_layers_only_the_split_is_the_most_even_one(
    num_layers: int, nodes: int, data: st.DataObject
) -> None:
    cuts = data.draw(st.sets(st.sampled_from(range(1, num_layers)))) if num_layers > 1 else set()
    if nodes > len(cuts) + 1:
        with pytest.raises(InvalidInputError, match=rf"can be cut into 1 to {len(cuts) + 1} nodes|cannot be cut"):
            even_split(num_layers, nodes, cuts)
        return
    ranges = even_split(num_layers, nodes, cuts)
    assert [layers.start for layers in ranges[1:]] == sorted({layers.start for layers in ranges[1:]} & cuts)
    assert [layer for layers in ranges for layer in range(layers.start, layers.stop)] == list(range(num_layers))
    others = ([0, *chosen, num_layers] for chosen in combinations(sorted(cuts), nodes - 1))
    least = min(sum((stop - start) ** 2 for start, stop in pairwise(edges)) for edges in others)
    assert sum(len(layers) ** 2 for layers in ranges) == least


def test_all_cuts_allowed_is_the_even_split() -> None:
    for nodes in range(1, 31):
        assert even_split(30, nodes, range(1, 30)) == even_split(30, nodes)
    assert even_split(7, 3, {2, 5}) == (LayerRange(0, 2), LayerRange(2, 5), LayerRange(5, 7))


def test_splits_are_read_inclusive_and_may_overlap() -> None:
    splits = LayerRange.parse_all("0-19, 10-29")
    assert splits == (LayerRange(0, 20), LayerRange(10, 30))
    check_cover(splits, 30)


@pytest.mark.parametrize("text", ["", "0-14,", "0-14;15-29", "a-b", "14-0", "0-14 15-29"])
def test_what_is_no_list_of_ranges_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"range|backwards"):
        LayerRange.parse_all(text)


def test_missing_layers_are_named() -> None:
    with pytest.raises(InvalidInputError, match=r"leave out layers 3-5, 9 of 0-9"):
        check_cover(LayerRange.parse_all("0-2,6-8"), 10)


def test_layers_beyond_the_model_are_named() -> None:
    with pytest.raises(InvalidInputError, match=r"15-30 reaches beyond the model's layers 0-29"):
        check_cover(LayerRange.parse_all("0-14,15-30"), 30)
