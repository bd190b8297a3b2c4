"""The shared words: each is checked when it is made, and comes back from the wire as it went."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet_core.clock import ManualClock, SystemClock
from meshnet_core.errors import (
    InvalidInputError,
)
from meshnet_core.ids import check_id, mint_boot_id, mint_session_id
from meshnet_core.layer_range import LayerRange
from meshnet_core.sampling import MAX_TOP_LOGPROBS, SamplingParams


def over_the_wire(document: object) -> Any:
    return json.loads(json.dumps(document, allow_nan=False))


# -- layer ranges -----------------------------------------------------------------------------------------------------

ranges = st.tuples(st.integers(0, 200), st.integers(1, 50)).map(lambda ends: LayerRange(ends[0], ends[0] + ends[1]))


@given(ranges)
def test_a_range_is_shown_inclusive_and_read_back(layers: LayerRange) -> None:
    assert LayerRange.parse(str(layers)) == layers
    assert str(layers) == f"{layers.start}-{layers.stop - 1}"
    assert [layer for layer in range(300) if layer in layers] == list(range(layers.start, layers.stop))
    assert len(layers) == layers.stop - layers.start


@given(ranges, ranges)
def test_one_range_covers_another_if_it_holds_all_its_layers(one: LayerRange, other: LayerRange) -> None:
    assert one.covers(other) == all(layer in one for layer in range(other.start, other.stop))


@given(ranges, st.integers(-5, 300))
def test_an_effective_start_lies_inside(layers: LayerRange, start: int) -> None:
    if start in layers:
        assert layers.starting_at(start) == LayerRange(start, layers.stop)
    else:
        with pytest.raises(InvalidInputError, match="lies outside layers"):
            layers.starting_at(start)


@pytest.mark.parametrize("text", ["7", " 7 ", "7-7", "7 - 7"])
def test_one_layer_may_be_written_alone(text: str) -> None:
    assert LayerRange.parse(text) == LayerRange(7, 8)


@pytest.mark.parametrize("text", ["", "-", "1-", "-3", "a-b", "1:4", "1-2-3", "1,2", "0x1-2", "1.5"])
def test_what_is_no_range_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidInputError, match="such as 0-20"):
        LayerRange.parse(text)


def test_backwards_is_refused_with_what_would_be_right() -> None:
    with pytest.raises(InvalidInputError, match="such as 2-5"):
        LayerRange.parse("5-2")


@pytest.mark.parametrize("ends", [(0, 0), (3, 2), (-1, 4)])
def test_a_range_is_never_empty_or_negative(ends: tuple[int, int]) -> None:
    with pytest.raises(InvalidInputError):
        LayerRange(*ends)


# -- sampling ---------------------------------------------------------------------------------------------------------

sampling_params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 10**6),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0, 100, exclude_min=True),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    seed=st.integers(0, 2**63 - 1),
    logprobs=st.none() | st.integers(0, MAX_TOP_LOGPROBS),
    logit_bias=st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100), max_size=3).map(lambda d: tuple(d.items())),
)


@given(sampling_params)
def test_sampling_params_come_back_from_the_wire_as_they_went(params: SamplingParams) -> None:
    assert SamplingParams.from_wire(over_the_wire(params.to_wire())) == params


def test_only_what_differs_from_the_default_goes_over_the_wire() -> None:
    assert SamplingParams().to_wire() == {}
    assert SamplingParams(temperature=0.5, logprobs=0).to_wire() == {"temperature": 0.5, "logprobs": 0}


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("temperature", [-0.1, 100.1, float("nan"), float("inf"), "1", None, True]),
        ("top_k", [-1, 1.0, "3", True, None]),
        ("top_p", [0, 0.0, -0.5, 1.01, float("nan"), "0.9"]),
        ("min_p", [-0.1, 1.1, None]),
        ("repetition_penalty", [0, -1, 101, float("inf")]),
        ("presence_penalty", [-2.1, 2.1, "0"]),
        ("frequency_penalty", [-2.1, 2.1, False]),
        ("seed", [-1, 2**63, 1.5, "1", True]),
        ("logprobs", [-1, MAX_TOP_LOGPROBS + 1, 1.0, True]),
        (
            "logit_bias",
            [[[1, 101]], [[-1, 0]], [[1, "2"]], [["1", 2]], [[1, float("nan")]], [[1, 2], [1, 3]], [[True, 1]]],
        ),
    ],
)
def test_each_sampling_field_is_bounded_and_named_when_wrong(field: str, wrong: list[Any]) -> None:
    for value in wrong:
        with pytest.raises(InvalidInputError, match=field):
            SamplingParams(**{field: value})
        with pytest.raises(InvalidInputError, match=field):
            SamplingParams.from_wire({field: value})


@pytest.mark.parametrize(
    "wrong", [5, None, {"1": 2}, [1], [[1]], [[1, 2, 3]], [[[1], 2]], [[i, 0] for i in range(1025)]]
)
def test_logit_bias_is_a_bounded_list_of_pairs(wrong: object) -> None:
    with pytest.raises(InvalidInputError, match="logit_bias"):
        SamplingParams.from_wire({"logit_bias": wrong})


@pytest.mark.parametrize("document", [None, [], "greedy", 1])
def test_sampling_is_an_object_without_unknown_fields(document: object) -> None:
    with pytest.raises(InvalidInputError, match="must be an object"):
        SamplingParams.from_wire(document)
    with pytest.raises(InvalidInputError, match="unknown sampling fields: beams, top_q"):
        SamplingParams.from_wire({"top_q": 1, "beams": 2, "top_k": 1})


def test_history_is_read_only_where_a_penalty_asks_for_it() -> None:
    assert not SamplingParams(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1).reads_history
    assert SamplingParams(repetition_penalty=1.1).reads_history
    assert SamplingParams(presence_penalty=0.1).reads_history
    assert SamplingParams(frequency_penalty=-0.1).reads_history


# -- ids and clocks ---------------------------------------------------------------------------------------------------


def test_ids_are_minted_apart_and_fit_for_the_wire() -> None:
    minted = {mint() for mint in (mint_session_id, mint_boot_id) for _ in range(50)}
    assert len(minted) == 100
    assert all(check_id(value, "id") == value for value in minted)


@pytest.mark.parametrize("value", ["", "a b", "ä", "a\n", "x" * 65, None, 5, b"a"])
def test_an_id_is_short_and_plain(value: object) -> None:
    with pytest.raises(InvalidInputError, match="session must be 1 to 64 characters"):
        check_id(value, "session")


def test_a_manual_clock_moves_only_forward_and_only_when_told() -> None:
    clock = ManualClock(5.0)
    assert clock.now() == clock.now() == 5.0
    clock.advance(1.5)
    assert clock.now() == 6.5
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-0.1)


def test_the_system_clock_is_monotonic() -> None:
    clock = SystemClock()
    assert clock.now() <= clock.now()
