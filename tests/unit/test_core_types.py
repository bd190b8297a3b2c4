"""The shared words: each is checked when it is made, and comes back from the wire as it went."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet_core import errors
from meshnet_core.clock import ManualClock, SystemClock
from meshnet_core.dtypes import dtype_bytes, wire_dtype
from meshnet_core.errors import (
    ERRORS_BY_CODE,
    CacheFullError,
    CacheMissError,
    HopError,
    HopFailedError,
    InvalidInputError,
    MeshnetError,
    MissReason,
    RequestRefusedError,
    error_from_wire,
)
from meshnet_core.frames import FrameReply, HopTiming
from meshnet_core.grammar import Grammar
from meshnet_core.ids import check_id, mint_boot_id, mint_session_id
from meshnet_core.layer_range import LayerRange
from meshnet_core.open_document import OpenDocument, OpenReply, ProbeReply
from meshnet_core.prefix import PrefixTerms, marks_of
from meshnet_core.route import Hop, Route
from meshnet_core.sampling import MAX_TOP_LOGPROBS, SampledToken, SamplingParams


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


# -- routes -----------------------------------------------------------------------------------------------------------

HOPS = (
    Hop("a", "http://a:7410", LayerRange(0, 15), "bfloat16", "0.1.0 (torch 2.13)"),
    Hop("b", "http://b:7410", LayerRange(15, 30)),
)
ROUTE = Route("smollm2", "f" * 64, 30, HOPS)


def test_a_route_comes_back_from_the_wire_as_it_went_also_from_a_newer_peer() -> None:
    document = over_the_wire(ROUTE.to_wire())
    assert Route.from_wire(document) == ROUTE
    document["hops"][0]["rack"] = 3
    document["cost_ms"] = 1.5
    assert Route.from_wire(document) == ROUTE
    assert str(ROUTE) == "a[0-14] -> b[15-29]"


@pytest.mark.parametrize(
    ("hops", "message"),
    [
        ((HOPS[0],), "end at layer 15 of 30"),
        ((HOPS[1],), "hop 0 starts at layer 15, but layer 0 is next"),
        ((HOPS[0], Hop("b", "http://b", LayerRange(14, 30))), "hop 1 starts at layer 14, but layer 15 is next"),
        ((HOPS[0], Hop("b", "http://b", LayerRange(16, 30))), "hop 1 starts at layer 16, but layer 15 is next"),
        ((HOPS[0], Hop("b", "http://b", LayerRange(15, 31))), "end at layer 31 of 30"),
        ((), "end at layer 0 of 30"),
    ],
)
def test_a_route_covers_the_model_exactly_once(hops: tuple[Hop, ...], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Route("m", "f", 30, hops)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("hops", 0, "start"), "0"),
        (("hops", 0, "start"), 0.0),
        (("hops", 0, "start"), False),
        (("hops", 0, "stop"), -1),
        (("hops", 0, "node_id"), 7),
        (("hops", 0, "url"), None),
        (("hops", 0, "dtype"), "int8"),
        (("hops", 0), "a"),
        (("hops",), {"a": 1}),
        (("num_layers",), 30.0),
        (("model",), ""),
        (("fingerprint",), ["f"]),
    ],
)
def test_a_route_is_read_without_guessing(path: tuple[str | int, ...], value: object) -> None:
    document = over_the_wire(ROUTE.to_wire())
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(InvalidInputError):
        Route.from_wire(document)
    if isinstance(place, dict):
        del place[path[-1]]
        with pytest.raises(InvalidInputError, match="missing"):
            Route.from_wire(document)


@pytest.mark.parametrize("document", [None, [], [["model", "m"]], "m"])
def test_a_route_is_an_object(document: object) -> None:
    with pytest.raises(InvalidInputError, match="a route is a JSON object"):
        Route.from_wire(document)


def test_hidden_states_travel_in_what_all_hops_compute_in_or_in_float32() -> None:
    assert wire_dtype(["bfloat16", "bfloat16"]) == "bfloat16"
    assert wire_dtype(["bfloat16", "float16"]) == "float32"
    assert wire_dtype(["float32", "bfloat16"]) == "float32"
    with pytest.raises(InvalidInputError, match="float32, bfloat16, float16"):
        dtype_bytes("int8")


# -- open documents ---------------------------------------------------------------------------------------------------

OPEN = OpenDocument(
    session="s-1",
    epoch=2,
    hop_index=1,
    route=ROUTE,
    wire_dtype="bfloat16",
    hidden_size=576,
    cache=True,
    sampling=SamplingParams(temperature=0.7, seed=2**63 - 1),
    prompt_length=3,
    prefill_length=5,
    expected_length=100,
    step_deadline_ms=30_000,
    history=(1, 2, 3, 4, 5),
    prefix=PrefixTerms("k-1", marks_of((1, 2, 3, 4, 5), (2, 4, 5)), keep_at=(2, 5)),
    grammar=Grammar("start: /a+/", (2,)),
    exact=True,
)


def grammar(**fields: object) -> dict[str, object]:
    return {"lark": "start: /a+/", "stop_ids": [2], **fields}


def changed(**fields: object) -> dict[str, Any]:
    return {**over_the_wire(OPEN.to_wire()), **fields}


def test_an_open_document_comes_back_from_the_wire_as_it_went() -> None:
    assert OpenDocument.from_wire(changed()) == OPEN


def test_each_hop_is_told_who_comes_next_and_the_tail_alone_the_tokens() -> None:
    first, tail = OPEN.for_hop(0), OPEN.for_hop(1)
    assert (first.hop, first.next_hop, first.history, first.grammar) == (HOPS[0], HOPS[1], (), None)
    assert (tail.hop, tail.next_hop, tail.history, tail.grammar) == (HOPS[1], None, OPEN.history, OPEN.grammar)


def test_a_document_of_a_session_without_prefixes_and_grammar_says_nothing_of_them() -> None:
    document = replace(OPEN, prefix=None, grammar=None, exact=False).to_wire()
    assert not {"prefix", "grammar", "exact"} & set(document)
    again = OpenDocument.from_wire(over_the_wire(document))
    assert (again.prefix, again.grammar, again.exact) == (None, None, False)


@pytest.mark.parametrize(
    "name", [name for name in OpenDocument.__dataclass_fields__ if name not in ("prefix", "grammar", "exact")]
)
def test_every_field_of_an_open_document_must_be_there(name: str) -> None:
    document = changed()
    del document[name]
    with pytest.raises(InvalidInputError, match=f"{name} is missing"):
        OpenDocument.from_wire(document)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("session", ["", "a b", "a/b", "x" * 65, 5, None]),
        ("epoch", [-1, 1.0, "1", True, None, 2**60]),
        ("hop_index", [-1, 2, "0"]),
        ("route", [None, {}, "r"]),
        ("wire_dtype", ["float8", 4, None]),
        ("hidden_size", [0, -1, 5.5, "576"]),
        ("cache", [1, 0, "on", None]),
        ("sampling", [None, [], {"temperature": -1}]),
        ("prompt_length", [0, -1, 6, "3"]),
        ("prefill_length", [0, 2, 101, True]),
        ("expected_length", [4, -1, 1e3]),
        ("step_deadline_ms", [0, -5, 1.5]),
        ("history", [None, "1234", [1, "2"], [1.0], [True], {"0": 1}, [[1]]]),
        (
            "prefix",
            [
                None,
                [],
                {},
                {"scope": "a", "marks": []},
                {"scope": "a", "marks": [], "keep_at": [], "more": 1},
                {"scope": "a b", "marks": [], "keep_at": []},
                {"scope": "a", "marks": [[1, "f" * 31]], "keep_at": []},
                {"scope": "a", "marks": [[1, "G" * 32]], "keep_at": []},
                {"scope": "a", "marks": [[0, "f" * 32]], "keep_at": []},
                {"scope": "a", "marks": [[2, "f" * 32], [2, "e" * 32]], "keep_at": []},
                {"scope": "a", "marks": [[True, "f" * 32]], "keep_at": []},
                {"scope": "a", "marks": [[1, "f" * 32, 3]], "keep_at": []},
                {"scope": "a", "marks": [[6, "f" * 32]], "keep_at": []},  # beyond what is prefilled
                {"scope": "a", "marks": [[3, "f" * 32]], "keep_at": [2]},
                {"scope": "a", "marks": [[3, "f" * 32]], "keep_at": [3.0]},
            ],
        ),
        (
            "grammar",
            [
                None,
                5,
                {},
                {"lark": "start: A"},
                grammar(lark=""),
                grammar(lark=5),
                grammar(lark="\ud800"),
                grammar(lark="x" * 200_000),
                grammar(stop_ids=[]),
                grammar(stop_ids=[-1]),
                grammar(stop_ids=["2"]),
                grammar(stop_ids=5),
                grammar(stop_ids=[1] * 65),
                grammar(more=1),
            ],
        ),
    ],
)
def test_each_field_of_an_open_document_is_checked(name: str, wrong: list[object]) -> None:
    for value in wrong:
        with pytest.raises(InvalidInputError):
            OpenDocument.from_wire(changed(**{name: value}))


def test_an_open_document_has_no_other_fields() -> None:
    with pytest.raises(InvalidInputError, match="unknown fields in the open document: beams"):
        OpenDocument.from_wire(changed(beams=2))


# -- replies ----------------------------------------------------------------------------------------------------------

times = st.floats(0, 1e6).map(lambda ms: round(ms, 3))
timings = st.builds(HopTiming, st.integers(0, 9), times, times, times, times, st.integers(0, 2**40))
tokens = st.builds(SampledToken, st.integers(0, 2**31 - 1)) | st.builds(
    SampledToken,
    st.integers(0, 2**31 - 1),
    st.floats(-100, 0),
    st.lists(st.tuples(st.integers(0, 10**6), st.floats(-100, 0)), max_size=20).map(tuple),
)
replies = st.builds(
    FrameReply,
    st.integers(0, 10**6),
    st.lists(tokens, max_size=3).map(tuple),
    st.lists(timings, max_size=4).map(tuple),
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
)


@given(replies)
def test_replies_to_frames_come_back_as_they_went(reply: FrameReply) -> None:
    assert FrameReply.from_wire(over_the_wire(reply.to_wire())) == reply


def test_who_answered_is_no_part_of_the_answer() -> None:
    assert FrameReply(3, boot="b-1") == FrameReply(3, boot="b-2")
    assert "boot" not in FrameReply(3, boot="b-1").to_wire()


@pytest.mark.parametrize(
    "reply",
    [
        OpenReply("b-1", 5),
        OpenReply("b-1", 5, (2, 4), snapshots=True),
        ProbeReply("b-1", None, 0),
        ProbeReply("b-1", 7, 3),
    ],
)
def test_small_replies_come_back_as_they_went(reply: OpenReply | ProbeReply) -> None:
    assert type(reply).from_wire(over_the_wire(reply.to_wire())) == reply


# -- errors -----------------------------------------------------------------------------------------------------------


def all_errors(cls: type[MeshnetError] = MeshnetError) -> list[type[MeshnetError]]:
    subclasses = [sub for sub in cls.__subclasses__() if sub.__module__ == errors.__name__]
    return [cls, *(found for sub in subclasses for found in all_errors(sub))]


def an_example(cls: type[MeshnetError]) -> MeshnetError:
    fields: dict[str, Any] = {}
    if issubclass(cls, HopError):
        fields = {"hop_index": 1, "position": 40, "boot": "b-1"}
    if cls is CacheMissError:
        fields["reason"] = MissReason.EXPIRED
    if cls is CacheFullError:
        fields["never"] = True
    if cls is RequestRefusedError:
        fields = {"param": "top_k"}
    return cls("what was wrong", **fields)


# Those with a code of their own. Other packages subclass some of them; on the wire those are their parents.
LEAVES = [
    cls for cls in all_errors() if cls is not MeshnetError and cls.__module__ == errors.__name__ and "code" in vars(cls)
]


@pytest.mark.parametrize("cls", LEAVES, ids=lambda cls: cls.code)
def test_every_error_has_a_code_and_a_status_of_its_own_and_comes_back_from_the_wire(cls: type[MeshnetError]) -> None:
    assert "code" in vars(cls)
    assert ERRORS_BY_CODE[cls.code].code == cls.code
    assert 400 <= cls.http_status < 600
    error = an_example(cls)
    again = error_from_wire(over_the_wire(error.to_wire()), fallback="")
    assert type(again) is cls
    assert (again.message, again.details()) == (error.message, error.details())


def test_codes_are_not_shared() -> None:
    codes = [cls.code for cls in LEAVES]
    assert len(codes) == len(set(codes))


def test_the_drawn_tree_is_the_tree() -> None:
    drawn = re.findall(r"[|`]-- (\w+) +(\d{3}) (\w+)", inspect.getdoc(errors) or "")
    assert sorted(drawn) == sorted((cls.__name__, str(cls.http_status), cls.code) for cls in LEAVES)


@pytest.mark.parametrize("reason", MissReason)
def test_every_reason_for_a_miss_comes_back(reason: MissReason) -> None:
    again = error_from_wire(over_the_wire(CacheMissError("m", reason=reason).to_wire()), fallback="")
    assert isinstance(again, CacheMissError)
    assert again.reason is reason


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        "no",
        {"error": "no"},
        {"error": {}},
        {"error": {"code": "of_a_newer_peer", "message": "m"}},
        {"error": {"code": "cache_miss", "message": "no reason"}},
        {"error": {"code": "cache_miss", "message": "m", "reason": "of a newer peer"}},
        {"error": {"code": "deadline", "message": "m", "hop_index": "1"}},
        {"error": {"code": "deadline", "message": "m", "hop_index": -1}},
        {"error": {"code": "deadline", "message": "m", "hop_index": True}},
        {"error": {"code": "deadline", "message": "m", "position": 1.5}},
        {"error": {"code": "deadline", "message": "m", "boot": 7}},
        {"error": {"code": "cache_full", "message": "m", "never": "yes"}},
        {"error": {"code": "bad_frame", "message": "m", "field_of_a_newer_peer": "x"}},
    ],
)
def test_what_is_no_error_of_ours_is_quoted_and_never_raises_on_its_own(document: object) -> None:
    error = error_from_wire(document, fallback="the whole text" * 100)
    assert type(error) is HopFailedError
    assert "the whole text" in error.message
    assert len(error.message) < 300


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
