"""What nodes say to each other about one session, independent of how it travels.

`Frame` carries positions through a hop; `FrameReply` is the tail's small answer flowing back. The codecs beside this
module (`http_codec`) put them on a wire, the transports move them.

    one session's positions        0 ............. 255 | 256 ......... 511 | 512 | 513 | ...
    its frames                     prefill chunk         prefill chunk       decode steps
    frame.position (before it)     0                     256                 512   513
    frame.seq_len  (in it)         256                   256                 1     1
    frame.sample                   0                     1                   1     1

A verify frame (speculative decoding, Leviathan et al. 2023) carries drafted tokens behind the newest one, and the tail
samples after each for as long as the draft is what it samples. The next frame begins where the drafts went wrong; a hop
whose state cannot be cut back falls back to where the frame began, and is sent what was right of it again:

    verify at 512       t  a  b  c      sample 4: a  b  x       c was wrong, x is the token instead
    next                         x  ..  at 515, where every hop can be cut back
                        t  a  b  x  ..  at 512, where one cannot; sample counts x and the drafts behind it
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from meshnet_core.sampling import SampledToken

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
PROTOCOLS = range(PROTOCOL_MIN, PROTOCOL_MAX + 1)
MAX_CHUNK = 256  # positions in one prefill frame on the cached path
MAX_DRAFT = 16  # drafted tokens in one verify frame


class Phase(enum.StrEnum):
    """What a frame is for; position and length alone cannot tell a last chunk of one from a decode step."""

    PREFILL = "prefill"
    DECODE = "decode"
    RESUME = "resume"  # the first chunk of a prefill that begins on a held prefix of the session, not on nothing
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class Frame:
    """Some positions of one session, on their way into one hop.

    Attributes:
        session: id of the generation, the same on all its frames.
        epoch: counts re-prefills within the session, from 0.
        hop_index: which hop of the session's route this frame enters.
        start_layer: the effective start there.
        phase: prefill, resume, decode or verify.
        position: positions of this session that came before this frame's first.
        seq_len: positions in this frame.
        sample: how many of the frame's trailing positions the tail samples after; 0 in a frame of a prefill that is
            not the last, be it a chunk or a replayed position.
        deadline_ms: what is left of the step's time, in milliseconds.
        cache: False on the stateless path: the frame is the whole sequence and no state is kept.
        body: raw little-endian tensor: int32 token ids ``[1, seq_len]`` into hop 0, hidden states
            ``[1, seq_len, hidden]`` in the session's wire dtype after it.
        protocol: the version it is written in: the one that all hops of its route agreed on.
        draft: of a verify frame the last ``sample - 1`` token ids, which later hops cannot read off the hidden states.
    """

    session: str
    epoch: int
    hop_index: int
    start_layer: int
    phase: Phase
    position: int
    seq_len: int
    sample: int
    deadline_ms: int
    cache: bool
    body: bytes | bytearray | memoryview = field(repr=False)
    protocol: int = PROTOCOL_MAX
    draft: tuple[int, ...] = ()

    @property
    def known(self) -> int:
        """Positions of the session that hold tokens of it for sure, once the frame has run: all but drafted ones."""
        return self.position + self.seq_len - len(self.draft)

    def onward(self, start_layer: int, deadline_ms: int, body: bytes | bytearray | memoryview) -> Frame:
        """The same positions on their way into the next hop. Field by field, in a third of the time of `replace`."""
        return Frame(
            self.session,
            self.epoch,
            self.hop_index + 1,
            start_layer,
            self.phase,
            self.position,
            self.seq_len,
            self.sample,
            deadline_ms,
            self.cache,
            body,
            self.protocol,
            self.draft,
        )


@dataclass(frozen=True, slots=True)
class HopTiming:
    """Where one hop spent a frame's time, in milliseconds, and the bytes of body it passed on."""

    hop_index: int
    queue_ms: float = 0.0
    forward_ms: float = 0.0
    sample_ms: float = 0.0
    total_ms: float = 0.0  # from the frame's arrival to the reply's departure, later hops included
    sent_bytes: int = 0

    def whole(self, total_ms: float, sent_bytes: int = 0) -> HopTiming:
        """With what is known once the frame is answered."""
        return HopTiming(self.hop_index, self.queue_ms, self.forward_ms, self.sample_ms, total_ms, sent_bytes)

    def to_wire(self) -> list[float]:
        ms = (self.queue_ms, self.forward_ms, self.sample_ms, self.total_ms)
        return [self.hop_index, *(round(value, 3) for value in ms), self.sent_bytes]

    @classmethod
    def from_wire(cls, row: list[float]) -> HopTiming:
        hop_index, queue, forward, sample, total, sent = row
        return cls(int(hop_index), queue, forward, sample, total, int(sent))


@dataclass(frozen=True, slots=True)
class FrameReply:
    """The answer to a frame.

    Attributes:
        position: positions of the session that are consumed once this frame has run.
        tokens: the tokens sampled, one for each of ``frame.sample``, but none after the first that differs from a
            draft; empty for a chunk that was only queued.
        timings: one entry for each hop that has run the frame, first hop first.
        draining: indices of the hops whose nodes are about to leave, so that the session should move from them.
        boot: boot id of the hop that was asked; the transport fills it in, and "" where it carries none. Who answered
            is no part of the answer: it is left out of the JSON form and of comparisons.
    """

    position: int
    tokens: tuple[SampledToken, ...] = ()
    timings: tuple[HopTiming, ...] = ()
    draining: tuple[int, ...] = ()
    boot: str = field(default="", compare=False)

    def to_wire(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "tokens": [token.to_wire() for token in self.tokens],
            "timings": [timing.to_wire() for timing in self.timings],
            **({"draining": list(self.draining)} if self.draining else {}),
        }

    @classmethod
    def from_wire(cls, document: dict[str, Any]) -> FrameReply:
        return cls(
            position=int(document["position"]),
            tokens=tuple(SampledToken.from_wire(token) for token in document["tokens"]),
            timings=tuple(HopTiming.from_wire(row) for row in document["timings"]),
            draining=tuple(int(hop_index) for hop_index in document.get("draining", ())),
        )
