"""Whatever comes in on a lean stream, its codec gives a message back as it was or raises an error of the tree."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from frame_strategies import frames, numbers, replies
from golden_frames import GOLDEN
from meshnet_core import stream_codec
from meshnet_core.errors import HopFailedError, MeshnetError
from meshnet_core.frames import PROTOCOLS, Frame, FrameReply
from meshnet_core.stream_codec import MAX_REQUEST, MessageBuffer
from meshnet_node.frame_stream import FrameStream, Send

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


class Wire(asyncio.Transport):
    """Keeps what a stream writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        return None

    def resume_reading(self) -> None:
        return None


async def at_the_door(pieces: list[bytes]) -> tuple[list[tuple[int, FrameReply | bytes]], int]:
    """What a stream answers to the bytes in ``pieces``, and how many frames it let in."""
    seen: list[Frame] = []

    async def answer(request: int, frame: Frame, _: Send) -> bytes:
        seen.append(frame)
        return stream_codec.encode_reply(FrameReply(frame.position), request)

    stream = FrameStream(
        answer,
        lambda *_: None,
        protocols=PROTOCOLS,
        max_body=64,
        body_timeout_s=60,
        idle_s=60,
        on_lost=lambda _: None,
    )
    wire = Wire()
    stream.connection_made(wire)
    for piece in pieces:
        stream.data_received(piece)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    stream.connection_lost(None)
    said, answers = MessageBuffer(2**20), []
    said.feed(bytes(wire.written))
    while (message := said.take()) is not None:
        answers.append(stream_codec.decode_answer(message))
    assert len(said) == 0
    return answers, len(seen)


@given(st.lists(st.sampled_from(FRAMES), max_size=3), st.binary(min_size=12, max_size=300), st.integers(1, 80))
def test_at_the_door_good_frames_are_answered_and_noise_ends_the_stream(
    good: list[bytes], noise: bytes, size: int
) -> None:
    wire = b"".join(good) + b"\xff\xff\xff\xff" + noise  # announces more than is read
    answers, seen = asyncio.run(at_the_door([wire[at : at + size] for at in range(0, len(wire), size)]))
    assert seen == len(good)
    replies = [answer for answer in answers if isinstance(answer[1], FrameReply)]
    refusals = [request for request, answer in answers if isinstance(answer, bytes)]
    assert len(replies) == len(good)
    assert refusals[-1] == stream_codec.CONNECTION


@given(st.lists(st.binary(max_size=60) | st.sampled_from(FRAMES + REPLIES), max_size=5))
def test_at_the_door_nothing_raises_and_nothing_follows_a_refusal(pieces: list[bytes]) -> None:
    answers, _ = asyncio.run(at_the_door(pieces))
    ended = [index for index, (request, _) in enumerate(answers) if request == stream_codec.CONNECTION]
    assert len(ended) <= 1
