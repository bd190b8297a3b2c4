"""One tracker of several that share a registry in this process, with its own clock; it sleeps until it is woken."""

from __future__ import annotations

import asyncio

from memory_registry import MemoryRegistry, MemoryStore
from meshnet_core.clock import ManualClock
from meshnet_core.membership import NodeInfo
from meshnet_tracker.directory import Directory
from meshnet_tracker.events import DirectoryEvent
from meshnet_tracker.sharing import Sharing, TrackerInfo

LEASE_S = 15.0


class SharingTracker:
    """Shares from `start` on.

    Attributes:
        events: that its directory told.
        wire: to the registry; it can be cut.
        task: of sharing; None before the start.
    """

    def __init__(self, name: str, store: MemoryStore, began: float) -> None:
        self.clock = ManualClock(began)
        self.events: list[DirectoryEvent] = []
        self.directory = Directory(self.clock, LEASE_S, on_event=self.events.append)
        self.wire = MemoryRegistry(store)
        info = TrackerInfo(f"t-{name}", f"http://{name}:7400", "0.1.0")
        self._naps: list[asyncio.Event] = []
        self.sharing = Sharing(self.directory, self.wire, info, self.clock, sleep=self._nap, draw=lambda: 0.0)
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.task = asyncio.get_running_loop().create_task(self.sharing.run())

    async def stop(self) -> None:
        """As by SIGKILL: nobody is told."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])

    async def _nap(self, seconds: float) -> None:
        nap = asyncio.Event()
        self._naps.append(nap)
        await nap.wait()

    def wake(self) -> None:
        naps, self._naps = self._naps, []
        for nap in naps:
            nap.set()

    def known(self) -> dict[str, NodeInfo]:
        """The live nodes, by their ids in order."""
        return {entry.node_id: entry for entry in self.directory.snapshot().nodes}

    def ids(self) -> list[str]:
        return list(self.known())

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]
