"""Splits: what makes a route, and which are tried."""

from __future__ import annotations

import pytest

from meshnet_core.errors import InvalidInputError
from meshnet_node.split import Split, every_split, parse_splits, sample_splits


def test_a_split_is_read_as_it_is_shown() -> None:
    split = Split.parse("0-4, 3-7")
    assert str(split) == "0-4,3-7"
    assert split.starts == (0, 5)
    assert split.num_layers == 8


@pytest.mark.parametrize("text", ["1-7", "0-2,4-7", "0-4,1-4", "0-4,0-3", "0-4,6", "0-4;5-7", ""])
def test_ranges_that_make_no_route_are_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        Split.parse(text)


def test_a_sample_has_one_of_each_kind() -> None:
    shown = [str(split) for split in sample_splits(30)]
    assert shown == ["0-14,15-29", "0-0,1-29", "0-28,29-29", "0-9,10-19,20-29", "0-15,14-29"]


def test_all_has_every_cut_in_two() -> None:
    shown = [str(split) for split in every_split(5)]
    assert shown == ["0-0,1-4", "0-1,2-4", "0-2,3-4", "0-3,4-4", "0-0,1-2,3-4", "0-2,1-4"]


@pytest.mark.parametrize("num_layers", range(1, 9))
def test_small_models_have_splits_too(num_layers: int) -> None:
    for splits in (sample_splits(num_layers), every_split(num_layers)):
        assert splits
        assert len(set(splits)) == len(splits)
        assert all(split.num_layers == num_layers for split in splits)
        assert num_layers == 1 or any(split.held[1].start < split.starts[1] for split in splits)


def test_several_splits_are_read_once_each() -> None:
    assert [str(split) for split in parse_splits("0-1,2-3|0-2,1-3|0-1,2-3", 4)] == ["0-1,2-3", "0-2,1-3"]
    assert parse_splits("all", 4) == every_split(4)
    assert parse_splits("sample", 4) == sample_splits(4)


@pytest.mark.parametrize(("text", "told"), [("0-1,2-2", "the model's last is 3"), ("some", "write FIRST-LAST")])
def test_splits_that_do_not_fit_are_refused(text: str, told: str) -> None:
    with pytest.raises(InvalidInputError, match=told):
        parse_splits(text, 4)
