"""A tracker on a real socket, with clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from meshnet_core.clock import ManualClock
from meshnet_core.tracker_client import TrackerClient
from meshnet_tracker.directory import Directory
from meshnet_tracker.server import create_app
from web_on_socket import serving


class Tracker:
    """A tracker on a free port, a client of ours and a plain one."""

    def __init__(self, url: str, directory: Directory, clock: ManualClock, http: aiohttp.ClientSession) -> None:
        self.url, self.directory, self.clock, self.http = url, directory, clock, http
        self.client = TrackerClient(url)

    async def raw(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with self.http.request(method, self.url + path, **options) as response:
            return response.status, await response.json()

    async def metric(self, name: str) -> float:
        async with self.http.get(f"{self.url}/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=")
            lines = (await response.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


async def tracker_on_socket() -> AsyncIterator[Tracker]:
    """One with an empty directory, whose clock stands still."""
    clock = ManualClock()
    directory = Directory(clock)
    async with serving(create_app(directory)) as url, aiohttp.ClientSession() as http:
        running = Tracker(url, directory, clock, http)
        yield running
        await running.client.close()
