"""The lean stream's messages: golden bytes, the worked example in the docs, and what is refused."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from golden_frames import DECODE, GOLDEN, PREFILL, VERIFY, Golden
from meshnet_core import stream_codec
from meshnet_core.errors import (
    BadFrameError,
    CacheMissError,
    HopFailedError,
    MissReason,
    ProtocolMismatchError,
    TooLargeError,
)
from meshnet_core.frames import FrameReply, HopTiming
from meshnet_core.http_codec import encode_json
from meshnet_core.sampling import SampledToken
from meshnet_core.stream_codec import CONNECTION, MessageBuffer

WIRE_DOC = Path(__file__).parents[2] / "docs" / "wire-protocol.md"
REQUEST = 7
GOOD = stream_codec.encode_frame(PREFILL.frame, REQUEST, 30000)


@pytest.mark.parametrize("golden", GOLDEN.values(), ids=GOLDEN)
def test_a_frame_is_these_bytes(golden: Golden) -> None:
    message = stream_codec.encode_frame(golden.frame, REQUEST, golden.frame.deadline_ms)
    assert message == bytes.fromhex(golden.stream_frame)
    assert stream_codec.decode_frame(message) == (REQUEST, golden.frame)


@pytest.mark.parametrize("golden", GOLDEN.values(), ids=GOLDEN)
def test_a_reply_is_these_bytes(golden: Golden) -> None:
    message = stream_codec.encode_reply(golden.reply, REQUEST)
    assert message == bytes.fromhex(golden.stream_reply)
    assert stream_codec.decode_answer(message) == (REQUEST, golden.reply)


@pytest.mark.parametrize("golden", [PREFILL, DECODE, VERIFY], ids=["prefill", "decode", "verify"])
def test_the_worked_example_in_the_docs_is_the_golden_frame(golden: Golden) -> None:
    blocks = re.findall(r"```text\n(.*?)\n```", WIRE_DOC.read_text("utf-8"), re.DOTALL)
    assert golden.stream_frame in blocks
    assert golden.stream_reply in blocks


def test_a_decode_step_is_two_bytes_a_dimension_and_less_than_four_hundred_others() -> None:
    head = len(stream_codec.encode_frame(DECODE.frame, REQUEST, 30000)) - len(DECODE.frame.body)
    timings = tuple(HopTiming(index, 1.0, 2.0, 3.0, 4.0, 1152) for index in range(8))
    reply = stream_codec.encode_reply(FrameReply(262, (SampledToken(49151),), timings), REQUEST)
    assert head + len(reply) < 400  # of a route of eight hops, where all tell their timings


def test_what_replies_seldom_have_travels_too() -> None:
    tokens = (SampledToken(3, -0.5, ((3, -0.5),)), SampledToken(4))
    reply = FrameReply(9, tokens, (HopTiming(0, total_ms=1.5),), draining=(1,))
    assert stream_codec.decode_answer(stream_codec.encode_reply(reply, 1)) == (1, reply)


def test_an_unknown_field_of_a_newer_peers_reply_is_passed_over() -> None:
    more = encode_json({"from_a_newer_peer": 1})
    message = bytearray(stream_codec.encode_reply(FrameReply(9), 1) + more)
    message[:4] = struct.pack("<I", len(message) - 4)
    assert stream_codec.decode_answer(message) == (1, FrameReply(9))


def test_a_refusal_comes_back_as_json() -> None:
    error = CacheMissError("gone", reason=MissReason.EVICTED, hop_index=1, position=17, boot="b-1")
    message = stream_codec.encode_refusal(error, REQUEST)
    assert stream_codec.decode_answer(message) == (REQUEST, encode_json(error.to_wire()))


def changed(at: int, new: bytes) -> bytes:
    return GOOD[:at] + new + GOOD[at + len(new) :]


REFUSED: dict[str, tuple[bytes, type[Exception], str]] = {
    "nothing": (b"\x00\x00\x00\x00", BadFrameError, "no frame"),
    "a reply": (bytes.fromhex(PREFILL.stream_reply), BadFrameError, "no frame"),
    "another protocol": (changed(5, b"\x02"), ProtocolMismatchError, "protocol is 2; this node speaks 1"),
    "another protocol, of another length": (changed(5, b"\x02")[:6], ProtocolMismatchError, "speaks 1"),
    "a head that breaks off": (GOOD[:40], BadFrameError, "its head alone is 44"),
    "no request number": (changed(8, bytes(4)), BadFrameError, "begin at 1"),
    "a phase unknown": (changed(6, b"\x09"), BadFrameError, "from 0 to 3, not 9"),
    "a flag unknown": (changed(7, b"\x03"), BadFrameError, "unknown flags 3 0"),
    "a byte that is kept free": (changed(41, b"\x01"), BadFrameError, "unknown flags 1 1"),
    "a number beyond all": (changed(24, b"\xff\xff\xff\xff"), BadFrameError, "to 2147483647, not to 4294967295"),
    "no positions": (changed(28, bytes(8)), BadFrameError, "at least 1"),
    "more samples than positions": (changed(32, b"\x06"), BadFrameError, "sample is 6, .* only 5 positions"),
    "a session longer than all": (changed(40, b"\xff"), BadFrameError, "ends within its head"),
    "no session": (changed(40, b"\x00"), BadFrameError, "the session must be 1 to 64"),
    "bytes in a session": (changed(44, b"\xff\xfe"), BadFrameError, "the session must be 1 to 64"),
    "more that is no JSON": (changed(42, b"\x02"), BadFrameError, "must be JSON"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_frame_is_refused_with_a_reason(name: str) -> None:
    message, error, reason = REFUSED[name]
    with pytest.raises(error, match=reason):
        stream_codec.decode_frame(message)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (b'{"x": 1}', "unknown field 'x'"),
        (b"[]", "a JSON object"),
        (b'{"draft": 5}', "a list of at most 16"),
        (b'{"draft": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]}', "a list of at most 16"),
        (b'{"draft": [1.0]}', "whole numbers"),
        (b'{"draft": [true]}', "whole numbers"),
        (b'{"draft": [-1]}', "whole numbers"),
        (b'{"draft": [2147483648]}', "whole numbers"),
    ],
)
def test_a_field_that_nobody_knows_is_refused(more: bytes, reason: str) -> None:
    body_at = len(GOOD) - len(PREFILL.frame.body)
    message = GOOD[:42] + struct.pack("<H", len(more)) + GOOD[44:body_at] + more + GOOD[body_at:]
    with pytest.raises(BadFrameError, match=reason):
        stream_codec.decode_frame(message)


@pytest.mark.parametrize(
    "message",
    [GOOD, bytes.fromhex(PREFILL.stream_reply)[:60], bytes.fromhex(DECODE.stream_reply)[:16], b"\x04\0\0\0\x03\0\0\0"],
    ids=["a frame", "cut timings", "a cut head", "a cut refusal"],
)
def test_what_is_no_answer_is_a_failed_hop(message: bytes) -> None:
    with pytest.raises(HopFailedError, match="unreadable"):
        stream_codec.decode_answer(message)


def test_messages_are_taken_whole_however_they_arrive() -> None:
    buffer, whole = MessageBuffer(1000), []
    for byte in GOOD * 3:
        buffer.feed(bytes([byte]))
        while (message := buffer.take()) is not None:
            whole.append(message)
    buffer.feed(GOOD + GOOD[:50])
    assert [*whole, buffer.take(), buffer.take()] == [GOOD] * 4 + [None]
    assert (len(buffer), buffer.request) == (50, REQUEST)


def test_a_message_of_a_length_that_none_has_is_refused() -> None:
    short, long = MessageBuffer(90), MessageBuffer(90)
    short.feed(struct.pack("<I", 7))
    with pytest.raises(BadFrameError, match="a message of 7 bytes; none is shorter than 8"):
        short.take()
    long.feed(GOOD[:11])
    assert (long.take(), long.request) == (None, CONNECTION)
    long.feed(GOOD[11:12])
    assert long.request == REQUEST
    with pytest.raises(TooLargeError, match="at most 90"):
        long.take()
