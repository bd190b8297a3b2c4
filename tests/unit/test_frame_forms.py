"""What is made of a frame and of a timing on their way: all but what was said stays."""

from __future__ import annotations

from dataclasses import fields, replace

from meshnet_core.frames import Frame, HopTiming, Phase

FRAME = Frame("s-1", 3, 2, 7, Phase.VERIFY, 11, 4, 3, 900, False, b"body", 5, (6, 8))
TIMING = HopTiming(2, 1.5, 2.5, 3.5, 4.5, 5)


def test_a_frame_that_goes_on_keeps_all_but_its_place_its_time_and_its_body() -> None:
    assert all(getattr(FRAME, one.name) != one.default for one in fields(FRAME))  # else one left out would not show
    assert FRAME.onward(9, 800, b"hidden") == replace(
        FRAME, hop_index=3, start_layer=9, deadline_ms=800, body=b"hidden"
    )


def test_a_timing_keeps_where_the_hop_spent_its_time() -> None:
    assert all(getattr(TIMING, one.name) != one.default for one in fields(TIMING))
    assert TIMING.whole(9.0, 7) == replace(TIMING, total_ms=9.0, sent_bytes=7)
    assert TIMING.whole(9.0) == replace(TIMING, total_ms=9.0, sent_bytes=0)
