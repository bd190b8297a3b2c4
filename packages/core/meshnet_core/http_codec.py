"""Frames and the JSON documents beside them as HTTP carries them: headers and bodies, read strictly.

Pure: knows no socket, no server and no client. It does not know hidden sizes either, so whether a body's length fits
``seq_len`` is checked where the session's terms are known. The whole contract is in ``docs/wire-protocol.md``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from meshnet_core.errors import BadFrameError, HopFailedError, InvalidInputError, ProtocolMismatchError
from meshnet_core.frames import MAX_DRAFT, PROTOCOL_MAX, PROTOCOLS, Frame, Phase
from meshnet_core.ids import check_id
from meshnet_core.open_document import OpenDocument
from meshnet_core.prefix import Mark, marks_from_wire, marks_to_wire

Body = bytes | bytearray | memoryview
ReplyValue = TypeVar("ReplyValue")
ChoiceValue = TypeVar("ChoiceValue")

PROTOCOL = "X-Meshnet-Protocol"
BOOT = "X-Meshnet-Boot"  # on replies only
FRAME_HEADERS = (
    PROTOCOL,
    "X-Meshnet-Session",
    "X-Meshnet-Epoch",
    "X-Meshnet-Hop-Index",
    "X-Meshnet-Start-Layer",
    "X-Meshnet-Phase",
    "X-Meshnet-Position",
    "X-Meshnet-Seq-Len",
    "X-Meshnet-Sample",
    "X-Meshnet-Deadline-Ms",
    "X-Meshnet-Cache",
)
DRAFT = "X-Meshnet-Draft"  # in verify frames that carry drafts, and only there
MAX_NUMBER = 2**31 - 1

_PREFIX = "x-meshnet-"
_BY_LOWER = {name.lower(): name for name in (*FRAME_HEADERS, DRAFT)}
_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)
_PHASES = {phase.value: phase for phase in Phase}
_FLAGS = {"on": True, "off": False}
# What reading a document of the wrong shape can raise.
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, InvalidInputError)


def encode_call(protocol: int = PROTOCOL_MAX) -> dict[str, str]:
    """Headers of a call that is not a frame, in a version of the protocol."""
    return {PROTOCOL: str(protocol)}


def encode_frame(frame: Frame) -> tuple[dict[str, str], Body]:
    """Headers, in the order of :data:`FRAME_HEADERS`, and body of a frame; read back by :func:`decode_frame`."""
    values = (
        frame.protocol,
        frame.session,
        frame.epoch,
        frame.hop_index,
        frame.start_layer,
        frame.phase.value,
        frame.position,
        frame.seq_len,
        frame.sample,
        frame.deadline_ms,
        "on" if frame.cache else "off",
    )
    headers = {name: str(value) for name, value in zip(FRAME_HEADERS, values, strict=True)}
    if frame.draft:
        headers[DRAFT] = ",".join(map(str, frame.draft))
    return headers, frame.body


def check_protocol(headers: Iterable[tuple[str, str]], protocols: range = PROTOCOLS) -> None:
    """Check the headers of a call that is not a frame; ``protocols`` are the versions that this node speaks.

    Raises:
        ProtocolMismatchError: another protocol version than this node speaks.
        BadFrameError: the version is missing, twice or no number, or another ``X-Meshnet-`` header is there.
    """
    _meshnet_headers(headers, {PROTOCOL.lower(): PROTOCOL}, protocols)


def decode_frame(headers: Iterable[tuple[str, str]], body: Body, protocols: range = PROTOCOLS) -> Frame:
    """A frame from the (name, value) pairs of a request and its body.

    Names are compared without regard to case; headers outside ``X-Meshnet-`` are not looked at. ``protocols`` are the
    versions that this node speaks.

    Raises:
        ProtocolMismatchError: another protocol version than this node speaks.
        BadFrameError: a header is missing, there twice, unknown or ill-formed; says which, and what would be right.
    """
    found = _meshnet_headers(headers, _BY_LOWER, protocols)
    missing = [name for name in FRAME_HEADERS if name not in found]
    if missing:
        raise BadFrameError(f"the frame lacks {', '.join(missing)}; every frame carries all of these once")
    try:
        session = check_id(found["X-Meshnet-Session"], "X-Meshnet-Session")
    except InvalidInputError as error:
        raise BadFrameError(error.message) from error
    seq_len = _number(found, "X-Meshnet-Seq-Len")
    sample = _number(found, "X-Meshnet-Sample")
    if seq_len < 1:
        raise BadFrameError("X-Meshnet-Seq-Len must be at least 1: a frame carries positions")
    if sample > seq_len:
        raise BadFrameError(f"X-Meshnet-Sample is {sample}, but the frame has only {seq_len} positions to sample after")
    return Frame(
        session=session,
        epoch=_number(found, "X-Meshnet-Epoch"),
        hop_index=_number(found, "X-Meshnet-Hop-Index"),
        start_layer=_number(found, "X-Meshnet-Start-Layer"),
        phase=_choice(found, "X-Meshnet-Phase", _PHASES),
        position=_number(found, "X-Meshnet-Position"),
        seq_len=seq_len,
        sample=sample,
        deadline_ms=_number(found, "X-Meshnet-Deadline-Ms"),
        cache=_choice(found, "X-Meshnet-Cache", _FLAGS),
        body=body,
        protocol=_number(found, PROTOCOL),
        draft=_draft(found),
    )


def encode_json(document: object) -> bytes:
    """Compact JSON; NaN and infinities, which JSON does not have, are a ValueError."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def decode_json(body: Body, what: str) -> object:
    """JSON of a peer, called ``what`` in the error.

    Raises:
        BadFrameError: not JSON in UTF-8, or it holds NaN or infinities.
    """
    try:
        return json.loads(bytes(body), parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise BadFrameError(f"{what} must be JSON in UTF-8: {error}") from error


def decode_open(body: Body) -> OpenDocument:
    """The document of an open call.

    Raises:
        BadFrameError: the body is not JSON.
        InvalidInputError: a field is missing, unknown or wrong.
    """
    return OpenDocument.from_wire(decode_json(body, "an open document"))


def encode_release(session: str, through_epoch: int | None, keep: Sequence[Mark] = ()) -> bytes:
    """A release of a session, or of its epochs up to one; read back by :func:`decode_release`."""
    through = {} if through_epoch is None else {"through_epoch": through_epoch}
    return encode_json({"session": session} | through | ({"keep": marks_to_wire(keep)} if keep else {}))


def decode_release(body: Body) -> tuple[str, int | None, tuple[Mark, ...]]:
    """The session that a release call names, the last epoch that it is about (None: all), and marks to keep it under.

    Raises:
        BadFrameError: the body is not ``{"session": id}`` with or without ``"through_epoch"`` and ``"keep"``.
    """
    document = decode_json(body, "a release")
    known = {"session", "through_epoch", "keep"}
    if not isinstance(document, dict) or "session" not in document or set(document) - known:
        raise BadFrameError(
            'a release is the JSON object {"session": id}; only "through_epoch" and "keep" may stand beside it'
        )
    epoch = document.get("through_epoch")
    if "through_epoch" in document and (type(epoch) is not int or not 0 <= epoch <= MAX_NUMBER):
        raise BadFrameError(f"through_epoch must be a whole number from 0 to {MAX_NUMBER}, not {str(epoch)[:80]!r}")
    try:
        return check_id(document["session"], "session"), epoch, marks_from_wire(document.get("keep", []))
    except InvalidInputError as error:
        raise BadFrameError(error.message) from error


def encode_released(count: int) -> bytes:
    return encode_json({"released": count})


def decode_released(body: Body) -> int:
    """How many entries a release freed.

    Raises:
        HopFailedError: the peer's answer is not ``{"released": n}``.
    """
    return decode_reply(body, lambda document: int(document["released"]))


def decode_reply(body: Body, from_wire: Callable[[dict[str, Any]], ReplyValue]) -> ReplyValue:
    """A peer's answer, read by ``from_wire``.

    Raises:
        HopFailedError: it is not what ``from_wire`` reads. The peer said yes, so this is its fault, not the frame's.
    """
    try:
        document = json.loads(bytes(body), parse_constant=_refuse_constant, parse_float=_finite)
        return from_wire(document)
    except _UNREADABLE as error:
        raise HopFailedError(f"unreadable answer from a peer: {bytes(body[:200])!r}") from error


def _meshnet_headers(headers: Iterable[tuple[str, str]], known: dict[str, str], protocols: range) -> dict[str, str]:
    """The ``X-Meshnet-`` headers among ``headers`` by their proper names; each at most once, none unknown."""
    ours = [(name.lower(), value) for name, value in headers if name.lower().startswith(_PREFIX)]
    # The version comes first: a newer peer's frame may carry headers that only its version explains.
    _check_version([value for name, value in ours if name == PROTOCOL.lower()], protocols)
    found: dict[str, str] = {}
    for lower, value in ours:
        name = known.get(lower)
        if name is None:
            raise BadFrameError(f"unknown header {lower[:80]!r}; this call knows {', '.join(known.values())}")
        if name in found:
            raise BadFrameError(f"{name} is there more than once; it must be there once")
        found[name] = value
    return found


def _check_version(values: list[str], protocols: range) -> None:
    spoken = str(protocols[0]) if len(protocols) == 1 else f"{protocols[0]} to {protocols[-1]}"
    if len(values) != 1:
        raise BadFrameError(f"{PROTOCOL} must be there once, not {len(values)} times; this node speaks {spoken}")
    if _number({PROTOCOL: values[0]}, PROTOCOL) not in protocols:
        raise ProtocolMismatchError(f"{PROTOCOL} is {values[0]}; this node speaks {spoken}")


def _number(found: dict[str, str], name: str) -> int:
    value = found[name]
    if _NUMBER.fullmatch(value) is None or (number := int(value)) > MAX_NUMBER:
        raise BadFrameError(f"{name} must be a whole number from 0 to {MAX_NUMBER}, not {value[:80]!r}")
    return number


def _draft(found: dict[str, str]) -> tuple[int, ...]:
    if DRAFT not in found:
        return ()
    parts = found[DRAFT].split(",")
    if len(parts) > MAX_DRAFT:
        raise BadFrameError(f"{DRAFT} holds {len(parts)} token ids; a frame drafts at most {MAX_DRAFT}")
    return tuple(_number({DRAFT: part}, DRAFT) for part in parts)


def _choice(found: dict[str, str], name: str, choices: dict[str, ChoiceValue]) -> ChoiceValue:
    try:
        return choices[found[name]]
    except KeyError:
        raise BadFrameError(f"{name} must be one of {', '.join(choices)}, not {found[name][:80]!r}") from None


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is too large a number")
    return number
