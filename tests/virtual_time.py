"""An event loop whose time jumps to the next thing that is due: hours pass in milliseconds, and in the same order.

For scenes in which nothing comes from outside (no sockets, no threads): sleeps and timeouts alone move the clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Where all is waiting, the clock goes straight to the earliest timer."""

    _now = 0.0
    _ready: Any  # of the base class, which has no other way to ask whether anything is left to run
    _scheduled: Any

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


class LoopClock:
    """The running loop's time as a `meshnet_core.clock.Clock`."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


def run_virtually(scene: Callable[[], Awaitable[T]]) -> T:
    """Run ``scene`` to its end in virtual time, from 0 on."""

    async def whole() -> T:
        return await scene()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(whole())
