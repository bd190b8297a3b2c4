"""Where a generation's time goes, told to whoever traces it; by default nobody, at next to no cost.

Knows no OpenTelemetry: `meshnet_gateway.otel_tracing` writes spans from what is told here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from meshnet_core.frames import Frame, FrameReply
from meshnet_core.route import Route


class GenerationTrace(Protocol):
    """One generation's. Parts follow one another or lie within one another; frames may overlap."""

    def part(self, name: str) -> AbstractContextManager[object]:
        """A stretch of the generation: ``place``, ``route``, ``open``, ``prefill``, ``mend``."""
        ...

    def delivering(self) -> AbstractContextManager[object]:
        """The generation stands still while somebody takes what it gave."""
        ...

    def frame(self, frame: Frame, route: Route, began: float, reply: FrameReply | None) -> None:
        """A frame sent at ``began`` (the clock's seconds) was answered just now, or with no reply failed for good."""
        ...

    def end(self, *, tokens: int, finish_reason: str | None) -> None:
        """The loop is over."""
        ...


class Tracing(Protocol):
    """Begins traces."""

    def begin(self, session: str, model: str, prompt_tokens: int) -> GenerationTrace:
        """The trace of a generation that begins now."""
        ...


class NoTrace:
    """Tells nobody."""

    _nothing: AbstractContextManager[object] = nullcontext()

    def part(self, name: str) -> AbstractContextManager[object]:
        del name
        return self._nothing

    def delivering(self) -> AbstractContextManager[object]:
        return self._nothing

    def frame(self, frame: Frame, route: Route, began: float, reply: FrameReply | None) -> None:
        pass

    def end(self, *, tokens: int, finish_reason: str | None) -> None:
        pass


NO_TRACE = NoTrace()
