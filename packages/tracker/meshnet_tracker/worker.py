"""One thread beside the event loop, for what takes long where there are many nodes; heartbeats are answered meanwhile.

What is run is given all that it reads, and changes nothing that the loop reads. Knows nothing of what it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Worker:
    """Runs one call after the other, in the order in which they were asked for."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, call: Callable[..., T], *arguments: object) -> T:
        """What ``call`` returns or raises. Who is cancelled does not wait for its end."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def close(self) -> None:
        """Take no more, and drop what has not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)
