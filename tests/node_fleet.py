"""Real nodes that a test may kill, stop and start again: each is watched by itself. And routes over some of them."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from free_ports import free_port
from meshnet_cli.children import Child, Children
from meshnet_core.coverage import ModelSummary
from meshnet_core.demand import Demand
from meshnet_core.route import Route
from meshnet_gateway.mesh import Mesh
from process_mesh import START_TIMEOUT_S

GATEWAY = "gateway"
SETTLE_S = 5.0  # what a test left behind may take so long to go by itself


@dataclass
class NodeFleet:
    """A tracker, a gateway where asked for, and nodes by name; a node keeps its port over restarts.

    Attributes:
        home: the nodes that :meth:`mend` leaves running, with their layers.
        layers: those of every node started so far.
    """

    folder: Path
    dtype: str = "float32"
    tracker_url: str = ""
    home: dict[str, str] = field(default_factory=dict)
    layers: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    _running: dict[str, tuple[Children, Child]] = field(default_factory=dict)
    _starts: int = 0

    def start(self, name: str, layers: str | None = None, *more: str) -> None:
        """Start a node, or start it again; `wait_ready` waits for it."""
        self.layers[name] = layers or self.layers[name]
        port = self.ports.setdefault(name, free_port())
        options = ["--layers", self.layers[name], "--tracker", self.tracker_url, "--port", str(port), "--name", name]
        self._launch(name, ["node", "smollm2", *options, "--dtype", self.dtype, "--threads", "1", *more])

    def start_gateway(self, *options: str) -> str:
        """Its API's address."""
        self._launch(GATEWAY, ["gateway", "--tracker", self.tracker_url, "--port", "0", *options])
        self.wait_ready(GATEWAY)
        return self._told(GATEWAY)

    def wait_ready(self, *names: str) -> None:
        for name in names:
            children, child = self._running[name]
            children.wait_ready(child, timeout_s=START_TIMEOUT_S)

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self._running[name][1].process.pid, number)

    def kill(self, name: str) -> None:
        """SIGKILL; the port stays the node's."""
        _, child = self._running[name]
        child.process.kill()
        child.process.wait()

    def ended(self, name: str, within_s: float) -> int:
        """The exit code of one that was told to end."""
        return self._running[name][1].process.wait(within_s)

    def alive(self, name: str) -> bool:
        return name in self._running and self._running[name][1].process.poll() is None

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def start_again(self, *names: str) -> None:
        """Start those of the nodes that have ended, and wait until all serve."""
        for name in names:
            if not self.alive(name):
                self.start(name)
        self.wait_ready(*names)

    def mend(self) -> None:
        """As at the beginning, whatever was done since: the nodes of ``home`` serve, with no session, and nothing else
        runs but the tracker."""
        for name in set(self._running) - {"tracker", *self.home}:
            self._end(name)
            self.layers.pop(name, None)
        for name, layers in self.home.items():
            if self.alive(name):
                self.signal(name, signal.SIGCONT)
            if self.layers[name] != layers or not self._settles(name):
                self._end(name)
                self.start(name, layers)
        self.wait_ready(*self.home)

    def stop(self) -> None:
        for name in sorted(self._running, key=lambda name: name == "tracker"):
            self._end(name)

    def _told(self, name: str) -> str:
        """The address of its ready line."""
        return str(self._running[name][1].url)

    def _settles(self, name: str) -> bool:
        """Whether it serves, and soon holds no session."""
        deadline = time.monotonic() + SETTLE_S
        while self.alive(name) and time.monotonic() < deadline:
            with suppress(OSError):
                told = fetch(f"{self.url(name)}/healthz")
                if told["draining"] or not told["sessions"]:
                    return not told["draining"]
            time.sleep(0.1)
        return False

    def _end(self, name: str) -> None:
        """At once: nothing of it is wanted, and a polite end waits for drains."""
        children, child = self._running.pop(name)
        if child.process.poll() is None:
            child.process.kill()  # a stopped one too
            child.process.wait()
        children.stop()

    def _launch(self, name: str, arguments: list[str]) -> None:
        if name in self._running:
            self._end(name)
        self._starts += 1
        folder = self.folder / f"{self._starts}-{name}"
        folder.mkdir(parents=True)
        children = Children(folder)
        self._running[name] = (children, children.start(name, arguments))


def fetch(url: str) -> dict[str, Any]:
    """One JSON document by GET, within two seconds."""
    with urllib.request.urlopen(url, timeout=2) as response:  # noqa: S310 - our own nodes
        document: dict[str, Any] = json.loads(response.read())
        return document


@contextmanager
def node_fleet(folder: Path, nodes: Mapping[str, str], dtype: str = "float32") -> Iterator[NodeFleet]:
    """A fleet of ``nodes`` (name -> layers), ready."""
    fleet = NodeFleet(folder, dtype, home=dict(nodes))
    with ExitStack() as closing:
        closing.callback(fleet.stop)
        fleet._launch("tracker", ["tracker", "--port", "0"])
        fleet.wait_ready("tracker")
        fleet.tracker_url = fleet._told("tracker")
        for name, layers in nodes.items():
            fleet.start(name, layers)
        fleet.wait_ready(*nodes)
        yield fleet


@dataclass
class RoutesOver:
    """Routes over the nodes named alone, with some of them reached at another address."""

    mesh: Mesh
    names: set[str]
    at: dict[str, str] = field(default_factory=dict)

    async def model(self, name: str) -> ModelSummary:
        return await self.mesh.model(name)

    async def route(self, model: ModelSummary, excluded: frozenset[str], demand: Demand | None = None) -> Route:
        others = {node.node_id for node in (await self.mesh.snapshot()).nodes} - self.names
        route = await self.mesh.route(model, excluded | others, demand)
        hops = tuple(replace(hop, url=self.at.get(hop.node_id, hop.url)) for hop in route.hops)
        return replace(route, hops=hops)
