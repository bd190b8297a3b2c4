"""What goes over the wire around frames: routes, open documents and replies come back as they went, or are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet_core.dtypes import dtype_bytes, wire_dtype
from meshnet_core.errors import (
    InvalidInputError,
)
from meshnet_core.frames import FrameReply, HopTiming
from meshnet_core.grammar import Grammar
from meshnet_core.layer_range import LayerRange
from meshnet_core.open_document import OpenDocument, OpenReply, ProbeReply
from meshnet_core.prefix import PrefixTerms, marks_of
from meshnet_core.route import Hop, Route
from meshnet_core.sampling import SampledToken, SamplingParams


def over_the_wire(document: object) -> Any:
    return json.loads(json.dumps(document, allow_nan=False))


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
