"""Frames and replies of every kind, for Hypothesis."""

from __future__ import annotations

import string

from hypothesis import strategies as st

from meshnet_core import http_codec
from meshnet_core.frames import MAX_DRAFT, Frame, FrameReply, HopTiming, Phase
from meshnet_core.sampling import SampledToken

numbers = st.integers(0, http_codec.MAX_NUMBER)
ids = st.text(string.ascii_letters + string.digits + "_.-", min_size=1, max_size=64)
milliseconds = st.integers(0, 10**9).map(lambda n: n / 1000)
logprobs = st.floats(max_value=0, allow_nan=False, allow_infinity=False)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    seq_len = draw(st.integers(1, http_codec.MAX_NUMBER))
    return Frame(
        session=draw(ids),
        epoch=draw(numbers),
        hop_index=draw(numbers),
        start_layer=draw(numbers),
        phase=draw(st.sampled_from(Phase)),
        position=draw(numbers),
        seq_len=seq_len,
        sample=draw(st.integers(0, seq_len)),
        deadline_ms=draw(numbers),
        cache=draw(st.booleans()),
        body=draw(st.binary(max_size=64)),
        draft=draw(st.lists(numbers, max_size=MAX_DRAFT).map(tuple)),
    )


replies = st.builds(
    FrameReply,
    position=numbers,
    tokens=st.lists(
        st.builds(SampledToken, id=numbers)
        | st.builds(SampledToken, numbers, logprobs, st.lists(st.tuples(numbers, logprobs), max_size=3).map(tuple)),
        max_size=3,
    ).map(tuple),
    timings=st.lists(
        st.builds(HopTiming, numbers, milliseconds, milliseconds, milliseconds, milliseconds, numbers), max_size=3
    ).map(tuple),
)
