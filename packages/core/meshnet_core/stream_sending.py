"""One frame, sent at once over a stream that had served before, until its answer is there: no task, no waiting.

What it cannot deal with by itself, a connection that broke or a hop that was asked too much, it gives to a patient
way, which makes the connection anew or waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from meshnet_core.errors import (
    DeadlineError,
    HopError,
    HopFailedError,
    HopUnreachableError,
    MeshnetError,
    RateLimitedError,
)
from meshnet_core.frames import Frame, FrameReply
from meshnet_core.hop_call import SHORTEST_PAUSE_S, HopCall
from meshnet_core.stream_connection import PATH, StreamConnection, StreamLostError
from meshnet_core.transport import FrameAnswered


class StreamSending:
    """Sends ``frame`` when it is made.

    Args:
        stream: a connection that is `ready`.
        url: of the hop.
        frame: what is sent; its deadline is how long the answer is waited for.
        answered: see `PromptTransport.send`.
        patiently: sends a frame whatever that takes, with what is left of its time.
        in_vain: is called where no answer came in time.
    """

    __slots__ = (
        "_again", "_answered", "_expires_at", "_frame", "_in_vain", "_loop", "_patiently", "_request", "_stream",
        "_timer", "_url",
    )  # fmt: skip

    def __init__(
        self,
        stream: StreamConnection,
        url: str,
        frame: Frame,
        answered: FrameAnswered,
        patiently: Callable[[str, Frame], Awaitable[FrameReply]],
        in_vain: Callable[[], None],
    ) -> None:
        self._stream = stream
        self._url = url
        self._frame = frame
        self._answered = answered
        self._patiently = patiently
        self._in_vain = in_vain
        self._again: asyncio.Task[None] | None = None
        self._loop = loop = asyncio.get_running_loop()
        self._request = stream.send(frame, frame.deadline_ms, self._came)
        self._expires_at = loop.time() + frame.deadline_ms / 1000
        self._timer = loop.call_at(self._expires_at, self._expired)

    def forget(self) -> None:
        """Nobody waits for the answer any more. Idempotent."""
        self._timer.cancel()
        self._stream.forget(self._request)
        if self._again is not None:
            self._again.cancel()

    def _came(self, answer: FrameReply | bytes | StreamLostError) -> None:
        self._timer.cancel()
        if isinstance(answer, FrameReply):
            self._answered(answer)
            return
        call = stream_call(self._url, self._frame)
        error: MeshnetError
        pause_s: float | None = None
        if isinstance(answer, StreamLostError):
            error = lost_error(call, answer)
            pause_s = None if answer.unreadable else 0.0
        else:
            error = call.refused(answer, self._stream.boot)
            if isinstance(error, RateLimitedError):
                pause_s = max(SHORTEST_PAUSE_S, error.retry_after_s)
        if pause_s is None:
            self._answered(error)
        else:
            self._again = self._loop.create_task(self._sent_again(pause_s))

    async def _sent_again(self, pause_s: float) -> None:
        """The identical frame once more; what comes of it is the answer."""
        try:
            if pause_s:
                await asyncio.sleep(min(pause_s, self._left_s()))
            left_ms = round(1000 * self._left_s())
            if left_ms < 1:
                self._expired()
                return
            answer: FrameReply | Exception = await self._patiently(self._url, replace(self._frame, deadline_ms=left_ms))
        except Exception as error:  # noqa: BLE001 - it is the answer
            answer = error
        self._answered(answer)

    def _left_s(self) -> float:
        return max(0.0, self._expires_at - self._loop.time())

    def _expired(self) -> None:
        self._stream.forget(self._request)
        self._in_vain()
        call = stream_call(self._url, self._frame)
        error = DeadlineError(f"{call} did not answer within {call.timeout_s:g} s", hop_index=call.hop_index)
        error.__cause__ = TimeoutError()
        self._answered(error)


def stream_call(url: str, frame: Frame) -> HopCall:
    """The call that a frame over a stream is."""
    return HopCall("GET", url, PATH, frame.deadline_ms / 1000, frame.hop_index)


def lost_error(call: HopCall, lost: StreamLostError) -> HopError:
    """What it means for a call that its connection is gone."""
    error: HopError
    if lost.unreadable:
        error = HopFailedError(f"{call}: {lost}", hop_index=call.hop_index)
    else:
        error = HopUnreachableError(f"{call} cannot be reached: {lost}", hop_index=call.hop_index)
    error.__cause__ = lost
    return error
