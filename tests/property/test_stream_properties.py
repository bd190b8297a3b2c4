"""Whatever comes in on a lean stream, its codec gives a message back as it was or raises an error of the tree."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from frame_strategies import frames, numbers, replies
from golden_frames import GOLDEN
from meshnet_core import stream_codec
from meshnet_core.errors import HopFailedError, MeshnetError
from meshnet_core.frames import Frame, FrameReply
from meshnet_core.stream_codec import MAX_REQUEST, MessageBuffer

requests = st.integers(1, MAX_REQUEST)
FRAMES = [bytes.fromhex(golden.stream_frame) for golden in GOLDEN.values()]
REPLIES = [bytes.fromhex(golden.stream_reply) for golden in GOLDEN.values()]


@given(frames(), requests, numbers)
def test_a_frame_comes_back_as_it_went(frame: Frame, request: int, deadline_ms: int) -> None:
    message = stream_codec.encode_frame(frame, request, deadline_ms)
    assert stream_codec.decode_frame(message) == (request, replace(frame, deadline_ms=deadline_ms))
    assert stream_codec.request_of(message) == request


@given(replies, requests)
def test_a_reply_comes_back_as_it_went(reply: FrameReply, request: int) -> None:
    assert stream_codec.decode_answer(stream_codec.encode_reply(reply, request)) == (request, reply)


@given(st.sampled_from(FRAMES + REPLIES), st.lists(st.tuples(st.integers(0, 97), st.binary(max_size=4)), max_size=4))
def test_changed_bytes_give_a_message_or_an_error_of_the_tree(message: bytes, changes: list[tuple[int, bytes]]) -> None:
    for at, new in changes:
        message = message[:at] + new + message[at + len(new) :]
    with contextlib.suppress(MeshnetError):
        stream_codec.decode_frame(message)
    if len(message) > 4:
        with contextlib.suppress(HopFailedError):
            stream_codec.decode_answer(message)


@given(st.lists(st.binary(max_size=40) | st.sampled_from(FRAMES), max_size=6))
def test_noise_is_messages_or_errors_of_the_tree(pieces: list[bytes]) -> None:
    buffer = MessageBuffer(200)
    with contextlib.suppress(MeshnetError):
        for piece in pieces:
            buffer.feed(piece)
            while (message := buffer.take()) is not None:
                stream_codec.decode_frame(message)


@given(st.lists(st.integers(1, 60), max_size=12))
def test_frames_are_taken_whole_however_they_are_cut(cuts: list[int]) -> None:
    wire, buffer, taken = b"".join(FRAMES), MessageBuffer(200), []
    for size in [*cuts, len(wire)]:
        buffer.feed(wire[:size])
        wire = wire[size:]
        while (message := buffer.take()) is not None:
            taken.append(message)
    assert taken == FRAMES
