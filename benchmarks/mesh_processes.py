"""A mesh of real processes to measure: a tracker, a gateway and a node for each range, as `meshnet up` starts them.

Unlike `meshnet up` it says each process's id, lets a node's environment be set, and can leave the gateway out.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environment import cores
from benchmarks.memory import peak_rss, rss
from meshnet_cli.children import Child, Children
from meshnet_cli.complaint import CommandFailedError

START_TIMEOUT_S = 60.0
NODE_TIMEOUT_S = 600.0
WAITING_S = 2.0  # until a node that waits has done all that it does meanwhile

# Environments of a node by the name of a wait policy: what its OpenMP threads do between two parallel regions.
WAIT_POLICIES: dict[str, dict[str, str]] = {
    "library": {},  # what libgomp or libiomp does when it is told nothing
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},  # sleep at once
    "active": {"OMP_WAIT_POLICY": "ACTIVE"},  # spin as good as for ever
}


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """How every node of a mesh is started.

    Attributes:
        devices: torch's name for each node's device; one for all, or one for each.
        wait_policy: ``meshnet`` for what `meshnet up` sets, ``pinned:N`` for that with another ``GOMP_SPINCOUNT`` of
            libgomp's, ``spin:N`` for such a one alone, or a key of `WAIT_POLICIES`.
        quantize: as for `meshnet node`; ``none`` holds weights in ``dtype`` where the file has them packed.
    """

    dtype: str
    threads: int
    devices: tuple[str, ...] = ("cpu",)
    wait_policy: str = "meshnet"
    quantize: str = "none"

    def arguments(self, index: int) -> list[str]:
        """Of the command of node ``index``, from 0."""
        device = self.devices[index % len(self.devices)]
        held = ["--dtype", self.dtype, "--quantize", self.quantize]
        return [*held, "--device", device, "--threads", str(self.threads)]

    def environment(self, nodes: int, index: int) -> dict[str, str]:
        """What is set for node ``index``, from 0, of ``nodes``.

        Raises:
            ValueError: an unknown wait policy.
        """
        name, _, count = self.wait_policy.partition(":")
        if name == "meshnet" or (name == "pinned" and count.isdigit()):
            from meshnet_cli.local_mesh import shared_cores  # noqa: PLC0415  brings the API's libraries, not always there

            return shared_cores(nodes, self.threads, index) | ({"GOMP_SPINCOUNT": count} if count else {})
        if name == "spin" and count.isdigit():
            return {"GOMP_SPINCOUNT": count}
        if name not in WAIT_POLICIES:
            known = ", ".join(("meshnet", "pinned:N", "spin:N", *WAIT_POLICIES))
            raise ValueError(f"wait policy {self.wait_policy!r} is unknown; it is one of {known}")
        return WAIT_POLICIES[name]


class MeshProcesses:
    """The processes of one mesh, all ready.

    Attributes:
        tracker_url: where the nodes are registered.
        api_url: the gateway's API; None where there is no gateway.
        node_urls: of each node, by its name.
    """

    def __init__(self, tracker: Child, gateway: Child | None, nodes: Sequence[Child]) -> None:
        self.tracker_url = str(tracker.url)
        self.api_url = gateway.url if gateway is not None else None
        self.node_urls = {node.name: str(node.url) for node in nodes}
        self._children = [tracker, *([gateway] if gateway is not None else []), *nodes]

    def peak_rss(self) -> dict[str, int | None]:
        """Most bytes held by each process, by its name."""
        return {child.name: peak_rss(child.process.pid) for child in self._children}

    def rss(self) -> dict[str, int | None]:
        """Bytes held by each process now, by its name."""
        return {child.name: rss(child.process.pid) for child in self._children}

    def pids(self) -> dict[str, int]:
        """Process ids, by name, for a profiler."""
        return {child.name: child.process.pid for child in self._children}


@contextmanager
def mesh_processes(
    model: str,
    splits: Sequence[str],
    options: NodeOptions,
    *,
    gateway: bool = False,
    of_node: Sequence[Sequence[str]] = (),
) -> Iterator[MeshProcesses]:
    """Start a mesh that serves ``model``, a node for each of ``splits``; all of it is gone when the block is left.

    ``of_node`` holds further arguments of each node's command.

    Raises:
        CommandFailedError: a process ended or was not ready in time; it quotes the process's last lines.
    """
    folder = Path(tempfile.mkdtemp(prefix="meshnet-bench-"))
    try:
        with Children(folder) as children:
            tracker = children.start("tracker", ["tracker", "--port", "0", "--insecure"])
            children.wait_ready(tracker, timeout_s=START_TIMEOUT_S)
            at_tracker = ["--tracker", str(tracker.url), "--insecure"]
            nodes = []
            for index, layers in enumerate(splits):
                name = f"node-{index + 1}"
                arguments = ["node", model, "--layers", layers, *at_tracker, "--port", "0", "--name", name]
                arguments += options.arguments(index)
                arguments += of_node[index] if index < len(of_node) else ()
                nodes.append(children.start(name, arguments, options.environment(len(splits), index)))
            started = children.start("gateway", ["gateway", *at_tracker, "--port", "0"]) if gateway else None
            children.wait_ready(*nodes, timeout_s=NODE_TIMEOUT_S)
            if started is not None:
                children.wait_ready(started, timeout_s=START_TIMEOUT_S)
            yield MeshProcesses(tracker, started, nodes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def waiting_node(model: str, options: NodeOptions) -> Iterator[int]:
    """A node process that waits for its layers and has none, as `meshnet node --layers auto` does until a tracker that
    answers says what to hold; it stays so, since its tracker is killed once it has announced itself.

    Yields:
        Its process id.

    Raises:
        CommandFailedError: it ended or did not announce itself in time, or was told layers all the same.
    """
    folder = Path(tempfile.mkdtemp(prefix="meshnet-bench-"))
    try:
        with Children(folder) as children:
            tracker = children.start("tracker", ["tracker", "--port", "0", "--insecure"])
            children.wait_ready(tracker, timeout_s=START_TIMEOUT_S)
            url = str(tracker.url)
            arguments = ["node", model, "--layers", "auto", "--tracker", url, "--insecure", "--port", "0"]
            node = children.start(
                "waiting node", [*arguments, *options.arguments(0)], options.environment(nodes=1, index=0)
            )
            children.wait(lambda: _knows_a_node(url), what="starting a node", timeout_s=NODE_TIMEOUT_S)
            tracker.process.kill()  # within the second in which it waits for more nodes
            tracker.process.wait()
            time.sleep(WAITING_S)
            said = node.log.read_text()
            if node.process.poll() is not None or "to hold layers" in said or "loading" in said:
                raise CommandFailedError(f"the node does not wait for layers; it wrote:\n{said}")
            yield node.process.pid
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _knows_a_node(tracker_url: str) -> bool:
    with urllib.request.urlopen(f"{tracker_url}/v1/snapshot", timeout=START_TIMEOUT_S) as answer:  # noqa: S310 - http
        return bool(json.load(answer)["nodes"])


def default_threads() -> int:
    """CPU threads for each side where none are asked for."""
    return min(2, cores())
