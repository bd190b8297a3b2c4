"""A `Registry` in this process for several trackers, with a clock of its own and wires that a test may cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from meshnet_core.clock import Clock
from meshnet_core.errors import RegistryUnreachableError
from meshnet_tracker.registry import Entry


class MemoryStore:
    """What the trackers share; ``clock`` is the registry's own."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.kept: dict[str, tuple[str, float]] = {}
        self.followers: set[asyncio.Queue[str | None]] = set()

    def lose_everything(self) -> None:
        """As a Redis without persistence does when it restarts."""
        self.kept.clear()


class MemoryRegistry:
    """One tracker's wire to the store; with ``cut`` it reaches nothing."""

    shown = "memory://"

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self._cut = False
        self._mine: set[asyncio.Queue[str | None]] = set()

    @property
    def cut(self) -> bool:
        return self._cut

    @cut.setter
    def cut(self, cut: bool) -> None:
        self._cut = cut
        if cut:
            for queue in self._mine:
                queue.put_nowait(None)  # what was under way is lost with the connection

    async def put(self, entries: Sequence[Entry]) -> None:
        await self._exchange()
        for entry in entries:
            self.store.kept[entry.key] = (entry.text, self.store.clock.now() + entry.left_s)
            for queue in self.store.followers:
                queue.put_nowait(entry.key)

    async def fetch(self, keys: Sequence[str]) -> list[Entry]:
        await self._exchange()
        now = self.store.clock.now()
        found = ((key, *self.store.kept[key]) for key in keys if key in self.store.kept)
        return [Entry(key, text, until - now) for key, text, until in found if until > now]

    async def keys(self) -> list[str]:
        await self._exchange()
        now = self.store.clock.now()
        return sorted(key for key, (_, until) in self.store.kept.items() if until > now)

    @asynccontextmanager
    async def changes(self) -> AsyncIterator[AsyncIterator[str]]:
        await self._exchange()
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        self.store.followers.add(queue)
        self._mine.add(queue)
        try:
            yield self._following(queue)
        finally:
            self.store.followers.discard(queue)
            self._mine.discard(queue)

    async def close(self) -> None:
        pass

    async def _following(self, queue: asyncio.Queue[str | None]) -> AsyncIterator[str]:
        while (key := await queue.get()) is not None and not self._cut:
            yield key
        raise RegistryUnreachableError("the wire is cut")

    async def _exchange(self) -> None:
        await asyncio.sleep(0)
        if self._cut:
            raise RegistryUnreachableError("the wire is cut")
