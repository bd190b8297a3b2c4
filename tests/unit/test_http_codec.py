"""The HTTP codec: golden frames, and each way a header or a document can be wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from golden_frames import GOLDEN, PREFILL, Golden
from meshnet_core import http_codec
from meshnet_core.errors import BadFrameError, HopFailedError, InvalidInputError, ProtocolMismatchError
from meshnet_core.frames import FrameReply
from meshnet_core.layer_range import LayerRange
from meshnet_core.open_document import OpenDocument, OpenReply
from meshnet_core.prefix import Mark, marks_of
from meshnet_core.route import Hop, Route
from meshnet_core.sampling import SamplingParams

WIRE_DOC = Path(__file__).parents[2] / "docs" / "wire-protocol.md"


def headers(**changes: str | None) -> list[tuple[str, str]]:
    """The golden prefill's headers with some changed (``seq_len="x"``) or left out (``seq_len=None``)."""
    changed = dict(PREFILL.headers)
    for key, value in changes.items():
        name = "X-Meshnet-" + "-".join(part.capitalize() for part in key.split("_"))
        changed.pop(name, None)
        if value is not None:
            changed[name] = value
    return list(changed.items())


@pytest.mark.parametrize("golden", GOLDEN.values(), ids=GOLDEN)
def test_a_golden_frame_has_exactly_these_headers_and_bytes(golden: Golden) -> None:
    encoded, body = http_codec.encode_frame(golden.frame)
    assert tuple(encoded.items()) == golden.headers
    assert bytes(body) == bytes.fromhex(golden.body_hex)
    assert http_codec.decode_frame(golden.headers, body) == golden.frame
    assert http_codec.encode_json(golden.reply.to_wire()).decode() == golden.reply_json
    assert http_codec.decode_reply(golden.reply_json.encode(), FrameReply.from_wire) == golden.reply


@pytest.mark.parametrize("golden", GOLDEN.values(), ids=GOLDEN)
def test_the_worked_example_in_the_docs_is_the_golden_frame(golden: Golden) -> None:
    blocks = re.findall(r"```(?:http|json)\n(.*?)\n```", WIRE_DOC.read_text(encoding="utf-8"), re.DOTALL)
    assert golden.request_text() in blocks
    assert golden.reply_json in blocks


def test_the_docs_name_every_frame_header() -> None:
    text = WIRE_DOC.read_text(encoding="utf-8")
    assert [
        name for name in (*http_codec.FRAME_HEADERS, http_codec.DRAFT, http_codec.BOOT) if f"`{name}`" not in text
    ] == []


def test_header_names_are_compared_without_regard_to_case_and_others_are_not_looked_at() -> None:
    pairs = [(name.lower(), value) for name, value in PREFILL.headers] + [("Host", "x"), ("Host", "y")]
    assert http_codec.decode_frame(pairs, PREFILL.frame.body) == PREFILL.frame


def test_the_stateless_path_is_told_by_the_cache_header() -> None:
    frame = replace(PREFILL.frame, cache=False)
    encoded, body = http_codec.encode_frame(frame)
    assert encoded["X-Meshnet-Cache"] == "off"
    assert http_codec.decode_frame(encoded.items(), body) == frame


@pytest.mark.parametrize("missing", [name for name in http_codec.FRAME_HEADERS if name != http_codec.PROTOCOL])
def test_a_missing_header_is_named(missing: str) -> None:
    with pytest.raises(BadFrameError, match=f"lacks {missing};"):
        http_codec.decode_frame([pair for pair in PREFILL.headers if pair[0] != missing], b"")


@pytest.mark.parametrize("twice", http_codec.FRAME_HEADERS)
def test_a_header_that_is_there_twice_is_named(twice: str) -> None:
    with pytest.raises(BadFrameError, match=f"{twice} .*once"):
        http_codec.decode_frame([*PREFILL.headers, (twice.upper(), dict(PREFILL.headers)[twice])], b"")


@pytest.mark.parametrize("name", ["epoch", "hop_index", "start_layer", "position", "seq_len", "sample", "deadline_ms"])
@pytest.mark.parametrize(
    "value", ["", "-1", "+1", " 1", "1.0", "1e3", "0x10", "007", "1_0", "٣", "2147483648", "9" * 5000]
)
def test_a_number_is_a_plain_whole_number_below_two_to_the_31(name: str, value: str) -> None:
    with pytest.raises(BadFrameError, match="must be a whole number from 0 to 2147483647"):
        http_codec.decode_frame(headers(**{name: value}), b"")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"protocol": None}, "X-Meshnet-Protocol must be there once, not 0 times; this node speaks 1"),
        ({"protocol": "one"}, "X-Meshnet-Protocol must be a whole number"),
        ({"session": ""}, "X-Meshnet-Session must be 1 to 64 characters"),
        ({"session": "s" * 65}, "X-Meshnet-Session must be 1 to 64 characters"),
        ({"session": "../etc"}, "X-Meshnet-Session must be 1 to 64 characters"),
        ({"phase": "Prefill"}, "X-Meshnet-Phase must be one of prefill, decode, resume, verify, not 'Prefill'"),
        ({"cache": "true"}, "X-Meshnet-Cache must be one of on, off, not 'true'"),
        ({"seq_len": "0", "sample": "0"}, "X-Meshnet-Seq-Len must be at least 1"),
        ({"sample": "6"}, "X-Meshnet-Sample is 6, but the frame has only 5 positions"),
        ({"temperature": "0.7"}, "unknown header 'x-meshnet-temperature'; this call knows X-Meshnet-Protocol, "),
        ({"boot": "b-1"}, "unknown header 'x-meshnet-boot'"),
    ],
)
def test_what_is_wrong_with_a_header_is_said(changes: dict[str, str | None], says: str) -> None:
    with pytest.raises(BadFrameError, match=re.escape(says)):
        http_codec.decode_frame(headers(**changes), b"")


@pytest.mark.parametrize("version", ["0", "2", "2147483647"])
def test_another_protocol_version_is_refused_before_anything_else_is_read(version: str) -> None:
    for pairs in (headers(protocol=version, session=None, shape="1,2"), [("x-meshnet-protocol", version)]):
        with pytest.raises(ProtocolMismatchError, match=f"is {version}; this node speaks 1$"):
            http_codec.decode_frame(pairs, b"")
        with pytest.raises(ProtocolMismatchError):
            http_codec.check_protocol(pairs)


def test_a_call_that_is_no_frame_carries_the_protocol_alone() -> None:
    http_codec.check_protocol([*http_codec.encode_call().items(), ("Host", "x")])
    with pytest.raises(BadFrameError, match="unknown header 'x-meshnet-session'"):
        http_codec.check_protocol(headers())
    with pytest.raises(BadFrameError, match="must be there once, not 0 times"):
        http_codec.check_protocol([("Host", "x")])


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe", b"NaN", b'{"a":Infinity}', b"1e999", b"[" * 100_000, b"9" * 10_000, b"{'a':1}"]
)
def test_what_is_not_json_is_a_bad_frame(body: bytes) -> None:
    with pytest.raises(BadFrameError, match="an open document must be JSON in UTF-8: "):
        http_codec.decode_open(body)


def test_numbers_that_json_cannot_carry_are_never_sent() -> None:
    with pytest.raises(ValueError, match="JSON"):
        http_codec.encode_json({"logprob": float("-inf")})


def test_an_open_document_comes_back_as_it_went() -> None:
    route = Route("m", "f", 4, (Hop("a", "http://a", LayerRange(0, 2)), Hop("b", "http://b", LayerRange(2, 4))))
    document = OpenDocument(
        session="s-1",
        epoch=1,
        hop_index=1,
        route=route,
        wire_dtype="bfloat16",
        hidden_size=4,
        cache=True,
        sampling=SamplingParams(temperature=0.5, seed=2**63 - 1),
        prompt_length=2,
        prefill_length=2,
        expected_length=9,
        step_deadline_ms=1000,
        history=(5, 6),
    )
    assert http_codec.decode_open(http_codec.encode_json(document.to_wire())) == document
    with pytest.raises(InvalidInputError, match="a JSON object, not list"):
        http_codec.decode_open(b"[]")


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"null",
        b"{}",
        b'{"through_epoch":1}',
        b'{"session":1}',
        b'{"session":"a b"}',
        b'{"session":"s","epoch":1}',
        b'{"session":"s","through_epoch":null}',
        b'{"session":"s","through_epoch":-1}',
        b'{"session":"s","through_epoch":true}',
        b'{"session":"s","through_epoch":1.0}',
        b'{"session":"s","keep":[[2,"session"]]}',
    ],
)
def test_a_release_names_one_session_and_at_most_an_epoch(body: bytes) -> None:
    with pytest.raises(BadFrameError, match=r"session|through_epoch|marks"):
        http_codec.decode_release(body)


@pytest.mark.parametrize("keep", [(), marks_of((5, 6, 7), (2, 3))])
@pytest.mark.parametrize("through_epoch", [None, 0, 3])
def test_a_release_and_its_answer_come_back_as_they_went(through_epoch: int | None, keep: tuple[Mark, ...]) -> None:
    body = http_codec.encode_release("s-1", through_epoch, keep)
    assert http_codec.decode_release(body) == ("s-1", through_epoch, keep)
    assert http_codec.decode_released(http_codec.encode_released(2)) == 2


@pytest.mark.parametrize(
    "answer", [b"", b"<html>", b"[]", b"{}", b'{"boot":1}', b'{"boot":"b","reserved_bytes":"x"}', b"7"]
)
def test_an_unreadable_yes_is_the_peers_fault(answer: bytes) -> None:
    with pytest.raises(HopFailedError, match="unreadable answer from a peer"):
        http_codec.decode_reply(answer, OpenReply.from_wire)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_an_answer_holds_no_number_that_could_not_be_passed_on(number: str) -> None:
    answer = f'{{"position":3,"tokens":[{{"id":7,"logprob":{number},"top":[]}}],"timings":[]}}'
    with pytest.raises(HopFailedError, match="unreadable answer from a peer"):
        http_codec.decode_reply(answer.encode(), FrameReply.from_wire)
