"""The frame of each step of one epoch's answer: the newest position, with drafts behind it where there are some. Pure.

Knows where the hops of the route stand after drafts that were wrong, and what they must be sent again because of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshnet_core.errors import HopFailedError
from meshnet_core.frames import MAX_DRAFT, Frame, FrameReply, Phase
from meshnet_core.open_document import FallBack, OpenReply
from meshnet_gateway.epoch_frames import EpochFrames

MOST_AGAIN = 8  # positions that are sent again at most, before a step without drafts makes them good


def fall_back_of(replies: Sequence[OpenReply]) -> FallBack | None:
    """How all hops of a route fall back together; None where one of them speaks no verify frames."""
    ways = {reply.verify for reply in replies}
    if None in ways:
        return None
    return FallBack.BEGIN if FallBack.BEGIN in ways else FallBack.ANYWHERE


class StepFrames:
    """The frames of one epoch's steps.

    Args:
        frames: makes them.
        way: how the hops fall back; None where they take no drafts.
    """

    def __init__(self, frames: EpochFrames, way: FallBack | None) -> None:
        self._frames = frames
        self._way = way
        self._begin: int | None = None  # where the hops fell back to, and the next frame begins

    def most_drafts(self, length: int) -> int:
        """The most drafts behind ``length`` tokens."""
        if self._way is None:
            return 0
        again = 0 if self._begin is None else length - 1 - self._begin
        return 0 if again >= MOST_AGAIN else MAX_DRAFT

    def next(self, tokens: Sequence[int], draft: Sequence[int]) -> Frame:
        """The step after ``tokens``, prompt and answer so far."""
        newest = len(tokens) - 1
        if self._begin is None and not draft:
            return self._frames.decode(newest, tokens[-1])
        begin = newest if self._begin is None else self._begin
        return self._frames.verify(begin, tokens[begin:], draft)

    def took(self, frame: Frame, reply: FrameReply) -> None:
        """Learn from a step's reply where the next one begins.

        Raises:
            HopFailedError: it cannot be the reply to that frame.
        """
        ids = tuple(token.id for token in reply.tokens)
        right = len(ids) - 1
        if not 0 <= right <= len(frame.draft) or ids[:right] != frame.draft[:right]:
            raise HopFailedError(f"the tail answered {len(ids)} tokens to a step with {len(frame.draft)} drafts")
        if frame.phase is not Phase.VERIFY:
            return
        back = right < len(frame.draft) and self._way is FallBack.BEGIN
        self._begin = frame.position if back else None
