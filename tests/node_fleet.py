"""Real nodes that a test may kill, stop and start again: each is watched by itself. And routes over some of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshnet_cli.children import Child, Children
from meshnet_core.coverage import ModelSummary
from meshnet_core.route import Route
from meshnet_gateway.mesh import Mesh
from process_mesh import START_TIMEOUT_S, free_port


@dataclass
class NodeFleet:
    """A tracker, a gateway where asked for, and nodes by name; a node keeps its port over restarts."""

    folder: Path
    dtype: str = "float32"
    tracker_url: str = ""
    layers: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    _running: dict[str, tuple[Children, Child]] = field(default_factory=dict)
    _starts: int = 0

    def start(self, name: str, layers: str | None = None) -> None:
        """Start a node, or start it again; `wait_ready` waits for it."""
        self.layers[name] = layers or self.layers[name]
        port = self.ports.setdefault(name, free_port())
        options = ["--layers", self.layers[name], "--tracker", self.tracker_url, "--port", str(port), "--name", name]
        self._launch(name, ["node", "smollm2", *options, "--dtype", self.dtype, "--threads", "1"])

    def start_gateway(self, *options: str) -> str:
        """Its API's address."""
        self._launch("gateway", ["gateway", "--tracker", self.tracker_url, "--port", "0", *options])
        return self.wait_ready("gateway")

    def wait_ready(self, *names: str) -> str:
        for name in names:
            children, child = self._running[name]
            children.wait_ready(child, timeout_s=START_TIMEOUT_S)
        return str(self._running[names[-1]][1].url)

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self._running[name][1].process.pid, number)

    def kill(self, name: str) -> None:
        """SIGKILL; the port stays the node's."""
        _, child = self._running[name]
        child.process.kill()
        child.process.wait()

    def alive(self, name: str) -> bool:
        return name in self._running and self._running[name][1].process.poll() is None

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def stop(self) -> None:
        for name, (children, child) in self._running.items():
            if name != "tracker" and child.process.poll() is None:
                self.signal(name, signal.SIGCONT)
                child.process.kill()  # nothing of them is wanted, and a polite end waits for drains
                child.process.wait()
            children.stop()

    def _launch(self, name: str, arguments: list[str]) -> None:
        self._starts += 1
        folder = self.folder / f"{self._starts}-{name}"
        folder.mkdir(parents=True)
        children = Children(folder)
        self._running[name] = (children, children.start(name, arguments))


@contextmanager
def node_fleet(folder: Path, nodes: Mapping[str, str], dtype: str = "float32") -> Iterator[NodeFleet]:
    """A fleet of ``nodes`` (name -> layers), ready."""
    fleet = NodeFleet(folder, dtype)
    with ExitStack() as closing:
        closing.callback(fleet.stop)
        fleet._launch("tracker", ["tracker", "--port", "0"])
        fleet.tracker_url = fleet.wait_ready("tracker")
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

    async def route(self, model: ModelSummary, excluded: frozenset[str]) -> Route:
        others = {node.node_id for node in (await self.mesh.snapshot()).nodes} - self.names
        route = await self.mesh.route(model, excluded | others)
        hops = tuple(replace(hop, url=self.at.get(hop.node_id, hop.url)) for hop in route.hops)
        return replace(route, hops=hops)
