"""Where the time of a generation's decode steps goes: means of parts that add up to the whole.

    reply k ── client ── gateway ── wire ── hop 0: queue, forward, frame ── hop 1: ..., sample ── reply k + 1

A hop's ``frame`` is what is left of its time: reading and checking the frame, writing the next one; with it, at every
hop but the last, goes the way to the next one and back. So it is with ``wire``, the way to the first hop. Nothing is
left out and nothing counted twice, since each part is a difference of two readings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from meshnet_core.clock import Clock
from meshnet_core.frames import Frame, FrameReply, HopTiming, Phase
from meshnet_core.route import Route
from meshnet_gateway.generation_trace import GenerationTrace, NoTrace

_STEPS = {Phase.DECODE, Phase.VERIFY}


class StepTimes(NoTrace):
    """A `GenerationTrace` that adds up the parts of decode steps that follow one another.

    Args:
        clock: the one that `GenerationTrace.frame` is told beginnings of.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sums: defaultdict[str, float] = defaultdict(float)  # milliseconds
        self._whole_ms = 0.0
        self._steps = 0
        self._ended: float | None = None  # when the frame before was answered, if nothing else came between
        self._delivered_s = 0.0  # since then

    def part(self, name: str) -> AbstractContextManager[object]:
        """Something else than decode steps begins: the next one follows no other."""
        self._ended = None
        return super().part(name)

    def delivering(self) -> AbstractContextManager[object]:
        return self._delivering()

    @contextmanager
    def _delivering(self) -> Iterator[None]:
        began = self._clock.now()
        try:
            yield
        finally:
            self._delivered_s += self._clock.now() - began

    def frame(self, frame: Frame, route: Route, began: float, reply: FrameReply | None) -> None:
        del route
        ended = self._clock.now()
        if reply is not None and reply.timings and frame.sample and frame.phase in _STEPS and self._ended is not None:
            self._steps += 1
            self._whole_ms += 1000 * (ended - self._ended)
            self._sums["client"] += 1000 * self._delivered_s
            self._sums["gateway"] += 1000 * (began - self._ended - self._delivered_s)
            self._sums["wire"] += 1000 * (ended - began) - reply.timings[0].total_ms
            self._hops(reply.timings)
        self._ended, self._delivered_s = ended, 0.0

    def to_json(self) -> dict[str, Any]:
        """JSON-ready: means in milliseconds of so many ``steps``; empty where there were none."""
        if not self._steps:
            return {}
        parts = {name: round(total / self._steps, 4) for name, total in self._sums.items()}
        return {"steps": self._steps, "step_ms": round(self._whole_ms / self._steps, 4), "parts": parts}

    def _hops(self, timings: Sequence[HopTiming]) -> None:
        for index, timing in enumerate(timings):
            later_ms = timings[index + 1].total_ms if index + 1 < len(timings) else 0.0
            own = {"queue": timing.queue_ms, "forward": timing.forward_ms, "sample": timing.sample_ms}
            own["frame"] = timing.total_ms - later_ms - sum(own.values())
            for name, ms in own.items():
                self._sums[f"hop {timing.hop_index} {name}"] += ms


class BothTraces:
    """A `GenerationTrace` that tells two."""

    def __init__(self, one: GenerationTrace, other: GenerationTrace) -> None:
        self._both = (one, other)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        one, other = self._both
        with one.part(name), other.part(name):
            yield

    @contextmanager
    def delivering(self) -> Iterator[None]:
        one, other = self._both
        with one.delivering(), other.delivering():
            yield

    def frame(self, frame: Frame, route: Route, began: float, reply: FrameReply | None) -> None:
        for trace in self._both:
            trace.frame(frame, route, began, reply)

    def end(self, *, tokens: int, finish_reason: str | None) -> None:
        for trace in self._both:
            trace.end(tokens=tokens, finish_reason=finish_reason)
