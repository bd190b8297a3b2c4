"""Frames of each kind with the very headers, bytes and replies they have on the wire.

The worked example of docs/wire-protocol.md is made of these; a test holds the two together. The model is a toy of
hidden size 4 in bfloat16, so that a body fits a line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from meshnet_core.frames import Frame, FrameReply, HopTiming, Phase
from meshnet_core.sampling import SampledToken

SESSION = "s-0f1e2d3c4b5a69788796a5b4c3d2e1f0"
HOST = "10.0.0.7:7410"
_EPOCH, _SAMPLE = "X-Meshnet-Epoch", "X-Meshnet-Sample"


_frame = partial(Frame, session=SESSION, epoch=0, cache=True)


def _head(
    hop: str, start: str, phase: str, position: str, seq_len: str, sample: str, deadline: str, *more: tuple[str, str]
) -> tuple[tuple[str, str], ...]:
    """The headers of a frame of epoch 0, in their order on the wire."""
    return (
        ("X-Meshnet-Protocol", "1"),
        ("X-Meshnet-Session", SESSION),
        (_EPOCH, "0"),
        ("X-Meshnet-Hop-Index", hop),
        ("X-Meshnet-Start-Layer", start),
        ("X-Meshnet-Phase", phase),
        ("X-Meshnet-Position", position),
        ("X-Meshnet-Seq-Len", seq_len),
        (_SAMPLE, sample),
        ("X-Meshnet-Deadline-Ms", deadline),
        ("X-Meshnet-Cache", "on"),
        *more,
    )


@dataclass(frozen=True)
class Golden:
    frame: Frame
    headers: tuple[tuple[str, str], ...]
    body_hex: str
    reply: FrameReply
    reply_json: str
    stream_frame: str  # both as request 7 of a lean stream, in hex, four bytes a group, eight groups a line
    stream_reply: str

    def request_text(self) -> str:
        """The request as people read it: the head as it is sent, the body as hex, four bytes a group."""
        head = [("Host", HOST), *self.headers, ("Content-Length", str(len(bytes.fromhex(self.body_hex))))]
        lines = ["POST /hop/forward HTTP/1.1", *(f"{name}: {value}" for name, value in head), "", self.body_hex]
        return "\n".join(lines)


# Five token ids (1, 9690, 198, 2683, 359) into the first hop, the prompt's last chunk: sample after its last position.
PREFILL = Golden(
    frame=_frame(
        hop_index=0,
        start_layer=0,
        phase=Phase.PREFILL,
        position=256,
        seq_len=5,
        sample=1,
        deadline_ms=30000,
        body=bytes.fromhex("01000000 da250000 c6000000 7b0a0000 67010000"),
    ),
    headers=_head("0", "0", "prefill", "256", "5", "1", "30000"),
    body_hex="01000000 da250000 c6000000 7b0a0000 67010000",
    reply=FrameReply(
        position=261,
        tokens=(SampledToken(28, -0.25, ((28, -0.25), (30, -2.5))),),
        timings=(HopTiming(0, 0.125, 12.5, 0.0, 25.75, 40), HopTiming(1, 0.25, 11.0, 0.5, 12.25, 0)),
    ),
    reply_json=(
        '{"position":261,"tokens":[{"id":28,"logprob":-0.25,"top":[[28,-0.25],[30,-2.5]]}],'
        '"timings":[[0,0.125,12.5,0.0,25.75,40],[1,0.25,11.0,0.5,12.25,0]]}'
    ),
    stream_frame=(
        "5e000000 01010001 07000000 00000000 00000000 00000000 00010000 05000000\n"
        "01000000 30750000 22000000 732d3066 31653264 33633462 35613639 37383837\n"
        "39366135 62346333 64326531 66300100 0000da25 0000c600 00007b0a 00006701\n"
        "0000"
    ),
    stream_reply=(
        "7f000000 02000100 07000000 05010000 02000000 1c000000 00000000 7d000000\n"
        "d4300000 00000000 96640000 28000000 01000000 fa000000 f82a0000 f4010000\n"
        "da2f0000 00000000 7b22746f 6b656e73 223a5b7b 226c6f67 70726f62 223a2d30\n"
        "2e32352c 22746f70 223a5b5b 32382c2d 302e3235 5d2c5b33 302c2d32 2e355d5d\n"
        "7d5d7d"
    ),
)

# One position of hidden states (1.0, -2.0, 0.5, 3.0 in bfloat16) into the second hop, whose layers begin at 15.
DECODE = Golden(
    frame=_frame(
        hop_index=1,
        start_layer=15,
        phase=Phase.DECODE,
        position=261,
        seq_len=1,
        sample=1,
        deadline_ms=28417,
        body=bytes.fromhex("803f00c0 003f4040"),
    ),
    headers=_head("1", "15", "decode", "261", "1", "1", "28417"),
    body_hex="803f00c0 003f4040",
    reply=FrameReply(position=262, tokens=(SampledToken(345),), timings=(HopTiming(1, 0.0, 9.75, 0.25, 10.25, 0),)),
    reply_json='{"position":262,"tokens":[{"id":345}],"timings":[[1,0.0,9.75,0.25,10.25,0]]}',
    stream_frame=(
        "52000000 01010201 07000000 00000000 01000000 0f000000 05010000 01000000\n"
        "01000000 016f0000 22000000 732d3066 31653264 33633462 35613639 37383837\n"
        "39366135 62346333 64326531 6630803f 00c0003f 4040"
    ),
    stream_reply=(
        "2c000000 02000100 07000000 06010000 01000000 59010000 01000000 00000000\n16260000 fa000000 0a280000 00000000"
    ),
)

# The same position replayed in a later epoch, whose prefill goes on beyond it: nothing is sampled.
REPLAY = Golden(
    frame=replace(DECODE.frame, epoch=1, sample=0),
    headers=tuple((name, {_EPOCH: "1", _SAMPLE: "0"}.get(name, value)) for name, value in DECODE.headers),
    body_hex=DECODE.body_hex,
    reply=FrameReply(position=262),
    reply_json='{"position":262,"tokens":[],"timings":[]}',
    stream_frame=(
        "52000000 01010201 07000000 01000000 01000000 0f000000 05010000 01000000\n"
        "00000000 016f0000 22000000 732d3066 31653264 33633462 35613639 37383837\n"
        "39366135 62346333 64326531 6630803f 00c0003f 4040"
    ),
    stream_reply="10000000 02000000 07000000 06010000 00000000",
)

# The step after that one with two drafts behind its token (345, 28, 1024), into the first hop: the second is wrong.
VERIFY = Golden(
    frame=_frame(
        hop_index=0,
        start_layer=0,
        phase=Phase.VERIFY,
        position=262,
        seq_len=3,
        sample=3,
        deadline_ms=30000,
        body=bytes.fromhex("59010000 1c000000 00040000"),
        draft=(28, 1024),
    ),
    headers=_head("0", "0", "verify", "262", "3", "3", "30000", ("X-Meshnet-Draft", "28,1024")),
    body_hex="59010000 1c000000 00040000",
    reply=FrameReply(
        position=265,
        tokens=(SampledToken(28), SampledToken(2683)),
        timings=(HopTiming(0, 0.125, 10.5, 0.0, 22.5, 24), HopTiming(1, 0.125, 10.0, 0.5, 11.0, 0)),
    ),
    reply_json=(
        '{"position":265,"tokens":[{"id":28},{"id":2683}],'
        '"timings":[[0,0.125,10.5,0.0,22.5,24],[1,0.125,10.0,0.5,11.0,0]]}'
    ),
    stream_frame=(
        "69000000 01010301 07000000 00000000 00000000 00000000 06010000 03000000\n"
        "03000000 30750000 22001300 732d3066 31653264 33633462 35613639 37383837\n"
        "39366135 62346333 64326531 66307b22 64726166 74223a5b 32382c31 3032345d\n"
        "7d590100 001c0000 00000400 00"
    ),
    stream_reply=(
        "48000000 02000200 07000000 09010000 02000000 1c000000 7b0a0000 00000000\n"
        "7d000000 04290000 00000000 e4570000 18000000 01000000 7d000000 10270000\n"
        "f4010000 f82a0000 00000000"
    ),
)

GOLDEN = {"prefill": PREFILL, "decode": DECODE, "replay": REPLAY, "verify": VERIFY}
