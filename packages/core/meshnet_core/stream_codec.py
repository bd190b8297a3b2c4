"""Frames and their answers as the lean stream carries them: short binary messages, read strictly.

Pure: knows no socket. One connection carries many frames at once; answers name the frame by its request number. The
tensor in a frame's body is the same as over HTTP (`http_codec`), which also has the JSON that rare parts travel in.

    frame    | length | 1 protocol phase flags | request | epoch ... deadline, sizes | session | more | body
    reply    | length | 2 0 tokens             | request | position, sizes | token ids | timings | more
    refusal  | length | 3 0 0                  | request | error document

All numbers are little-endian; ``length`` counts the bytes after it. The contract is in ``docs/wire-protocol.md``.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import lru_cache
from typing import Any

from meshnet_core.errors import (
    BadFrameError,
    HopFailedError,
    InvalidInputError,
    MeshnetError,
    ProtocolMismatchError,
    TooLargeError,
)
from meshnet_core.frames import MAX_DRAFT, PROTOCOLS, Frame, FrameReply, HopTiming, Phase
from meshnet_core.http_codec import MAX_NUMBER, Body, decode_json, decode_reply, encode_json
from meshnet_core.ids import check_id
from meshnet_core.sampling import SampledToken

STREAM = "meshnet-hop/1"  # what the HTTP upgrade names
FRAME, REPLY, REFUSAL = 1, 2, 3
CONNECTION = 0  # the request number of a refusal that is about the connection: nothing more is read on it
MAX_REQUEST = 2**32 - 1

_FRAME = struct.Struct("<IBBBBIIIIIIIIBBH")
_REPLY = struct.Struct("<IBBHIIHH")
_REFUSAL = struct.Struct("<IBBHI")
_TIMING = struct.Struct("<6I")
_LENGTH = _U32 = struct.Struct("<I")
_FRONT = struct.Struct("<IB3xI")  # what every message begins with, but for what its kind has in between
_PHASES = (Phase.PREFILL, Phase.RESUME, Phase.DECODE, Phase.VERIFY)
_PHASE_NUMBERS = {phase: number for number, phase in enumerate(_PHASES)}
_CACHE = 1  # in the flags
_MAX_U32 = 2**32 - 1

READ_BYTES = 256 * 1024
"""What each end of a stream reads at once, into memory that it keeps; asyncio would take so much anew each time."""
MAX_HEAD = _FRAME.size + 64 + 0xFFFF  # bytes of a frame besides its body


def encode_frame(frame: Frame, request: int, deadline_ms: int) -> bytes:
    """A frame as request number ``request`` of its connection, with ``deadline_ms`` in place of its own."""
    session = frame.session.encode("ascii")
    more = encode_json({"draft": frame.draft}) if frame.draft else b""
    head = _FRAME.pack(
        _FRAME.size - 4 + len(session) + len(more) + len(frame.body),
        FRAME,
        frame.protocol,
        _PHASE_NUMBERS[frame.phase],
        _CACHE if frame.cache else 0,
        request,
        frame.epoch,
        frame.hop_index,
        frame.start_layer,
        frame.position,
        frame.seq_len,
        frame.sample,
        deadline_ms,
        len(session),
        0,
        len(more),
    )
    return b"".join((head, session, more, frame.body))


def decode_frame(message: Body, protocols: range = PROTOCOLS) -> tuple[int, Frame]:
    """A whole message that is a frame: its request number and the frame, whose body is a view of ``message``.

    Raises:
        ProtocolMismatchError: another protocol version than those in ``protocols``.
        BadFrameError: it is no frame, or a field is ill-formed; says which, and what would be right.
    """
    _check_front(message, protocols)
    (_, _, protocol, phase, flags, request, *numbers, session_size, reserved, more_size) = _FRAME.unpack_from(message)
    epoch, hop_index, start_layer, position, seq_len, sample, deadline_ms = numbers
    if request == CONNECTION:
        raise BadFrameError("request numbers begin at 1")
    if phase >= len(_PHASES):
        raise BadFrameError(f"the phase must be a number from 0 to {len(_PHASES) - 1}, not {phase}")
    if flags & ~_CACHE or reserved:
        raise BadFrameError(f"unknown flags {flags} {reserved}; the first may have its lowest bit set, the second none")
    if max(numbers) > MAX_NUMBER:
        raise BadFrameError(f"the numbers of a frame go from 0 to {MAX_NUMBER}, not to {max(numbers)}")
    if seq_len < 1:
        raise BadFrameError("the sequence length must be at least 1: a frame carries positions")
    if sample > seq_len:
        raise BadFrameError(f"sample is {sample}, but the frame has only {seq_len} positions to sample after")
    body_at = _FRAME.size + session_size + more_size
    if body_at > len(message):
        raise BadFrameError(f"the frame ends within its head: {len(message)} bytes, of {body_at} and a body")
    draft = _draft(message[_FRAME.size + session_size : body_at]) if more_size else ()
    return request, Frame(
        session=_session(bytes(message[_FRAME.size : _FRAME.size + session_size])),
        epoch=epoch,
        hop_index=hop_index,
        start_layer=start_layer,
        phase=_PHASES[phase],
        position=position,
        seq_len=seq_len,
        sample=sample,
        deadline_ms=deadline_ms,
        cache=flags == _CACHE,
        body=memoryview(message)[body_at:],
        protocol=protocol,
        draft=draft,
    )


def _check_front(message: Body, protocols: range) -> None:
    if len(message) < 6 or message[4] != FRAME:
        raise BadFrameError(f"a message that is no frame: {bytes(message[:16])!r}; a frame is of kind {FRAME}")
    # The version comes first: of a newer peer's frame, only its version explains the rest.
    if message[5] not in protocols:
        spoken = str(protocols[0]) if len(protocols) == 1 else f"{protocols[0]} to {protocols[-1]}"
        raise ProtocolMismatchError(f"the frame's protocol is {message[5]}; this node speaks {spoken}")
    if len(message) < _FRAME.size:
        raise BadFrameError(f"a frame of {len(message)} bytes; its head alone is {_FRAME.size}")


@lru_cache(maxsize=1024)  # each of a session's frames names it
def _session(named: bytes) -> str:
    try:
        return check_id(named.decode("ascii", "replace"), "the session")
    except InvalidInputError as error:
        raise BadFrameError(error.message) from error


def encode_reply(reply: FrameReply, request: int) -> bytes:
    """The answer to frame ``request``: token ids and timings in binary, whatever else it has as JSON after them."""
    tokens, rows = reply.tokens, reply.timings
    more: dict[str, Any] = {"draining": reply.draining} if reply.draining else {}
    if any(token.logprob is not None for token in tokens):
        beside = [token.to_wire() for token in tokens]
        more["tokens"] = [{key: value for key, value in token.items() if key != "id"} for token in beside]
    parts = [*[_U32.pack(token.id) for token in tokens], *map(_timing_bytes, rows)]
    if more:
        parts.append(encode_json(more))
    length = _REPLY.size - 4 + sum(map(len, parts))
    return b"".join((_REPLY.pack(length, REPLY, 0, len(tokens), request, reply.position, len(rows), 0), *parts))


def _timing_bytes(timing: HopTiming) -> bytes:
    numbers: tuple[int, ...] = (
        timing.hop_index,
        round(1000 * timing.queue_ms),
        round(1000 * timing.forward_ms),
        round(1000 * timing.sample_ms),
        round(1000 * timing.total_ms),
        timing.sent_bytes,
    )
    if max(numbers) > _MAX_U32:
        numbers = (timing.hop_index, *(min(_MAX_U32, number) for number in numbers[1:]))
    return _TIMING.pack(*numbers)


def encode_refusal(error: MeshnetError, request: int) -> bytes:
    """The refusal of frame ``request``, or where that is `CONNECTION` of all that follows on this connection."""
    document = encode_json(error.to_wire())
    return _REFUSAL.pack(_REFUSAL.size - 4 + len(document), REFUSAL, 0, 0, request) + document


def decode_answer(message: Body, boot: str = "") -> tuple[int, FrameReply | bytes]:
    """A whole message that answers a frame: its request number, and the reply or a refusal's JSON.

    Args:
        message: length included.
        boot: boot id of who answers, for the reply.

    Raises:
        HopFailedError: it is neither.
    """
    kind = message[4]
    if kind == REFUSAL and len(message) >= _REFUSAL.size:
        return _REFUSAL.unpack_from(message)[4], bytes(message[_REFUSAL.size :])
    if kind != REPLY or len(message) < _REPLY.size:
        raise HopFailedError(f"unreadable answer from a peer: {bytes(message[:80])!r}")
    _, _, _, token_count, request, position, timing_count, _ = _REPLY.unpack_from(message)
    timings_at = _REPLY.size + 4 * token_count
    more_at = timings_at + _TIMING.size * timing_count
    if more_at > len(message) or request == CONNECTION:
        raise HopFailedError(f"unreadable answer from a peer: {bytes(message[:80])!r}")
    ids = struct.unpack_from(f"<{token_count}I", message, _REPLY.size)
    rows = _TIMING.iter_unpack(message[timings_at:more_at])
    if more_at == len(message):
        return request, FrameReply(position, tuple(map(SampledToken, ids)), tuple(map(_timing, rows)), boot=boot)
    read = _with_more(message[more_at:], position, ids, tuple(map(_timing, rows)))
    return request, replace(read, boot=boot)


def _with_more(more: Body, position: int, ids: tuple[int, ...], timings: tuple[HopTiming, ...]) -> FrameReply:
    def read(document: dict[str, Any]) -> FrameReply:
        beside = document.pop("tokens", None) or [{} for _ in ids]
        tokens = [{**rest, "id": token} for rest, token in zip(beside, ids, strict=True)]
        rows = [timing.to_wire() for timing in timings]
        return FrameReply.from_wire({**document, "position": position, "tokens": tokens, "timings": rows})

    return decode_reply(more, read)


def _timing(row: tuple[int, ...]) -> HopTiming:
    hop_index, queue, forward, sample, total, sent = row
    return HopTiming(hop_index, queue / 1000, forward / 1000, sample / 1000, total / 1000, sent)


def _draft(more: Body) -> tuple[int, ...]:
    """What few frames have: the token ids of a draft."""
    document = decode_json(more, "what comes after a frame's session")
    if not isinstance(document, dict):
        raise BadFrameError("what comes after a frame's session must be a JSON object")
    draft = document.pop("draft", [])
    if document:
        raise BadFrameError(f"unknown field {min(document)[:80]!r} of a frame; this version knows draft")
    if not isinstance(draft, list) or len(draft) > MAX_DRAFT:
        raise BadFrameError(f"draft must be a list of at most {MAX_DRAFT} token ids")
    if any(type(token) is not int or not 0 <= token <= MAX_NUMBER for token in draft):
        raise BadFrameError(f"the token ids of a draft are whole numbers from 0 to {MAX_NUMBER}")
    return tuple(draft)


class MessageBuffer:
    """Bytes as they arrive, taken out as whole messages.

    Args:
        limit: bytes of the longest message that is waited for, its length's own four not counted.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._data = bytearray()

    def __len__(self) -> int:
        """Bytes that are part of no message yet."""
        return len(self._data)

    @property
    def request(self) -> int:
        """The request number of the frame at the front, as far as there is one, else `CONNECTION`."""
        return request_of(self._data)

    def feed(self, data: Body) -> None:
        self._data += data

    def take(self) -> bytes | None:
        """The next whole message, its length included; None while it is not all there.

        Raises:
            BadFrameError: it announces fewer bytes than any message has.
            TooLargeError: it announces more than are read; raised once its request number is there.
        """
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if length < _FRONT.size - _LENGTH.size:
            raise BadFrameError(f"a message of {length} bytes; none is shorter than {_FRONT.size - _LENGTH.size}")
        if length > self._limit:
            if len(self._data) < _FRONT.size:
                return None
            raise TooLargeError(f"a message of {length} bytes is too large; at most {self._limit} are read here")
        end = _LENGTH.size + length
        if len(self._data) < end:
            return None
        if len(self._data) == end:
            message, self._data = bytes(self._data), bytearray()
        else:
            message = bytes(memoryview(self._data)[:end])
            del self._data[:end]
        return message


def request_of(message: Body) -> int:
    """The request number of a message that may be ill-formed in all else; `CONNECTION` where it names none."""
    if len(message) < _FRONT.size:
        return CONNECTION
    _, kind, request = _FRONT.unpack_from(message)
    return int(request) if kind == FRAME else CONNECTION
