"""Whatever comes in, the codec gives a frame back as it was or raises an error of the tree."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from frame_strategies import frames, replies
from golden_frames import PREFILL
from meshnet_core import http_codec
from meshnet_core.errors import HopFailedError, MeshnetError
from meshnet_core.frames import Frame, FrameReply
from meshnet_core.layer_range import LayerRange
from meshnet_core.open_document import OpenDocument, OpenReply, ProbeReply
from meshnet_core.route import Hop, Route
from meshnet_core.sampling import SamplingParams

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)

OPEN = OpenDocument(
    session="s-1",
    epoch=0,
    hop_index=0,
    route=Route("m", "f", 4, (Hop("a", "http://a", LayerRange(0, 2)), Hop("b", "http://b", LayerRange(2, 4)))),
    wire_dtype="float32",
    hidden_size=4,
    cache=True,
    sampling=SamplingParams(temperature=0.5, logprobs=2),
    prompt_length=2,
    prefill_length=2,
    expected_length=9,
    step_deadline_ms=1000,
).to_wire()


@given(frames(), st.randoms(use_true_random=False))
def test_a_frame_comes_back_as_it_went_in_any_order_of_headers(frame: Frame, random: Any) -> None:
    headers, body = http_codec.encode_frame(frame)
    pairs = list(headers.items())
    random.shuffle(pairs)
    assert http_codec.decode_frame(pairs, body) == frame


@given(replies)
def test_a_reply_comes_back_as_it_went(reply: FrameReply) -> None:
    assert http_codec.decode_reply(http_codec.encode_json(reply.to_wire()), FrameReply.from_wire) == reply


names = st.sampled_from([*http_codec.FRAME_HEADERS, http_codec.DRAFT, http_codec.BOOT, "x-meshnet-", "Host"]) | st.text(
    max_size=20
)
values = st.sampled_from([value for _, value in PREFILL.headers]) | st.integers().map(str) | st.text()
changes = st.lists(st.tuples(st.sampled_from(["set", "add", "drop"]), names, values), max_size=4)


@given(changes, st.binary(max_size=16))
def test_changed_headers_give_a_frame_or_an_error_of_the_tree(changes: list[tuple[str, str, str]], body: bytes) -> None:
    pairs = list(PREFILL.headers)
    for what, name, value in changes:
        if what != "add":
            pairs = [pair for pair in pairs if pair[0] != name]
        if what != "drop":
            pairs.append((name, value))
    for decode in (lambda: http_codec.decode_frame(pairs, body), lambda: http_codec.check_protocol(pairs)):
        with contextlib.suppress(MeshnetError):
            decode()


@given(st.lists(st.tuples(st.text(), st.text()), max_size=15), st.binary(max_size=16))
def test_arbitrary_headers_are_refused(pairs: list[tuple[str, str]], body: bytes) -> None:
    with contextlib.suppress(MeshnetError):
        http_codec.decode_frame(pairs, body)
        raise AssertionError("a frame out of noise")


def paths(document: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON document."""
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    return [at, *(path for key, value in inner for path in paths(value, (*at, key)))]


@given(st.sampled_from(paths(OPEN)), json_values)
def test_an_open_document_with_any_field_changed_gives_one_or_an_error_of_the_tree(
    path: tuple[Any, ...], value: Any
) -> None:
    document: Any = {"": json.loads(json.dumps(OPEN))}
    holder, key = document, ""
    for step in path:
        holder, key = holder[key], step
    holder[key] = value
    with contextlib.suppress(MeshnetError):
        http_codec.decode_open(json.dumps(document[""]).encode())


@given(st.binary(max_size=64) | json_values.map(lambda value: json.dumps(value).encode()))
def test_arbitrary_bodies_and_answers_raise_only_errors_of_the_tree(body: bytes) -> None:
    for decode in (http_codec.decode_open, http_codec.decode_release):
        with contextlib.suppress(MeshnetError):
            decode(body)
    for from_wire in (FrameReply.from_wire, OpenReply.from_wire, ProbeReply.from_wire):
        with contextlib.suppress(HopFailedError):
            http_codec.decode_reply(body, from_wire)
    with contextlib.suppress(HopFailedError):
        http_codec.decode_released(body)
