"""Whether a frame agrees with what its session was opened for, asked before it is taken in. Pure.

Its place in the order of frames is not looked at here: that is `hop_session`'s. Nor is anything of the shard but its
vocabulary: `frame_fit` says whether layers can run what comes to them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from meshnet_core.errors import BadFrameError, CacheMissError, MissReason
from meshnet_core.frames import MAX_CHUNK, MAX_DRAFT, Frame, Phase
from meshnet_node.hop_session import HopSession


def check_token_ids(ids: Sequence[int], vocabulary: int) -> None:
    """Refuse ids that no embedding has a row for; on some devices those would take the whole process along.

    Raises:
        BadFrameError: names the first of them.
    """
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        wrong = next(token for token in ids if not 0 <= token < vocabulary)
        raise BadFrameError(f"token id {wrong} lies outside the vocabulary of {vocabulary}")


def check_terms(session: HopSession, frame: Frame) -> None:
    """Whether the frame agrees with the session's terms.

    Raises:
        BadFrameError: length, phase, dtype or cache mode is wrong.
        CacheMissError: it is meant for another start layer.
    """
    document = session.document
    if frame.start_layer != document.hop.layers.start:
        raise CacheMissError(
            f"the session was opened from layer {document.hop.layers.start}, the frame enters at {frame.start_layer}",
            reason=MissReason.RANGE_MISMATCH,
        )
    if frame.cache != document.cache:
        opened = "on" if document.cache else "off"
        raise BadFrameError(f"the session was opened with cache {opened}; its frames must say the same")
    if frame.seq_len < 1 or frame.deadline_ms < 1:
        raise BadFrameError("sequence length and deadline must be at least 1")
    if frame.position + frame.seq_len > document.expected_length:
        raise BadFrameError(
            f"the frame ends at position {frame.position + frame.seq_len}, the session was opened for "
            f"{document.expected_length}"
        )
    _check_phase(session, frame)
    if frame.phase is not Phase.VERIFY and frame.draft:
        raise BadFrameError(f"a {frame.phase.value} frame carries no draft; verify frames do")
    width = session.width_in
    if len(frame.body) != frame.seq_len * width:
        what = "int32 token ids" if document.hop_index == 0 else f"{document.wire_dtype} hidden states"
        raise BadFrameError(
            f"a body of {frame.seq_len} positions of {what} is {frame.seq_len * width} bytes, not {len(frame.body)}"
        )
    if document.hop_index == 0:
        ids = struct.unpack(f"<{frame.seq_len}i", frame.body)
        check_token_ids(ids, session.shard.backend.vocab_size)
        if frame.draft and ids[-len(frame.draft) :] != frame.draft:
            raise BadFrameError("the draft must be the last token ids of the body")


def _check_phase(session: HopSession, frame: Frame) -> None:
    if not frame.cache:
        if frame.phase is not Phase.PREFILL or frame.position != 0 or frame.sample != 1:
            raise BadFrameError(
                "with the cache off every frame is a whole sequence: phase prefill, position 0, sample 1"
            )
        return
    if frame.phase is Phase.DECODE:
        _check_decode(session, frame)
        return
    if frame.phase is Phase.VERIFY:
        _check_verify(session, frame)
        return
    if frame.phase is Phase.RESUME and frame.position not in session.offered:
        raise BadFrameError(f"a resume frame at position {frame.position}; no prefix to begin from there was told of")
    end = frame.position + frame.seq_len
    if frame.seq_len > MAX_CHUNK:
        raise BadFrameError(f"a prefill chunk carries at most {MAX_CHUNK} positions, not {frame.seq_len}")
    if end > session.document.prefill_length:
        raise BadFrameError(
            f"a prefill chunk ends at position {end}, beyond the {session.document.prefill_length} to prefill"
        )
    if frame.sample != int(end == session.document.prefill_length):
        raise BadFrameError("the last prefill chunk samples after its last position, the others do not sample")


def _check_verify(session: HopSession, frame: Frame) -> None:
    """A verify frame carries tokens of the answer and drafts behind them, and samples after the last of each."""
    if session.falls_back is None:
        raise BadFrameError("no verify frames are taken here, as open did not say that they are")
    if frame.position < session.document.prefill_length:
        raise BadFrameError(
            f"a verify frame at position {frame.position}, inside the {session.document.prefill_length} to prefill"
        )
    if frame.seq_len > MAX_CHUNK or len(frame.draft) > MAX_DRAFT:
        raise BadFrameError(f"a verify frame carries at most {MAX_CHUNK} positions, {MAX_DRAFT} of them drafted")
    if not 1 <= frame.sample == len(frame.draft) + 1 <= frame.seq_len:
        raise BadFrameError(
            f"a verify frame of {frame.seq_len} positions with {len(frame.draft)} drafts samples "
            f"{len(frame.draft) + 1} times, not {frame.sample}"
        )
    check_token_ids(frame.draft, session.shard.backend.vocab_size)


def _check_decode(session: HopSession, frame: Frame) -> None:
    """A decode frame carries the newest position, or replays one of the answer with its original boundaries."""
    document = session.document
    if frame.seq_len != 1:
        raise BadFrameError(f"a decode frame carries one position, not {frame.seq_len}")
    if frame.position < document.prompt_length:
        raise BadFrameError(
            f"a decode frame at position {frame.position}, inside the prompt of {document.prompt_length} positions"
        )
    if frame.sample != int(frame.position + 1 >= document.prefill_length):
        raise BadFrameError(
            f"a decode frame at position {frame.position} with sample {frame.sample}: it samples after its "
            f"position, unless it replays one before the last of the {document.prefill_length} to prefill"
        )
