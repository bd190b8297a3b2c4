"""A whole mesh on this machine, as `meshnet up` and the demo start it: tracker, gateway and nodes, each a process.

Decoding must not share its interpreter lock with streaming, and a node's death must not take the stream along; so the
gateway has a process of its own too.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from meshnet_cli import access
from meshnet_cli.children import Child, Children
from meshnet_cli.complaint import CommandFailedError
from meshnet_core.errors import MeshnetError
from meshnet_core.layer_range import LayerRange

START_TIMEOUT_S = 60.0  # for the tracker and the gateway, and for the mesh to be whole once all nodes are ready
ASK_TIMEOUT_S = 5.0

Show = Callable[[str, str], None]
"""Told (name of a child, line that it wrote)."""


@dataclass(frozen=True)
class Plan:
    """What is to run.

    Attributes:
        model: MODEL, as the nodes are given it.
        splits: layers of each node.
        api_port: the gateway's; 0 takes any free one.
        node_options: passed on to every node.
        threads: CPU threads of each node.
        gateway_options: passed on to the gateway.
    """

    model: str
    splits: tuple[LayerRange, ...]
    api_port: int = 0
    node_options: tuple[str, ...] = ()
    threads: int = field(default=1)
    gateway_options: tuple[str, ...] = ()


def threads_each(nodes: int) -> int:
    """CPU threads for each of ``nodes`` nodes on this machine, so that together they have one for each core."""
    return max(1, len(_cores()) // nodes)


class LocalMesh:
    """The processes of a plan. Use it with ``with``: all of them are gone when the block is left.

    Attributes:
        api_url: the gateway's API, once started.
        nodes: the node processes, in the order of the splits.
        folder: where the logs are.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.folder = Path(tempfile.mkdtemp(prefix="meshnet-up-"))
        self._show: Show = _show_nothing
        self._children = Children(self.folder, lambda child, line: self._show(child.name, line))
        self.api_url = ""
        self.nodes: list[Child] = []

    def start(self, show: Show) -> None:
        """Start everything; returns when the gateway serves the whole model. Until then ``show`` is told what is
        written.

        Raises:
            CommandFailedError: a process ended, or was not ready in time.
        """
        children, plan = self._children, self._plan
        self._show = show
        tracker = children.start("tracker", ["tracker", "--port", "0", "--insecure"])  # all on loopback
        children.wait_ready(tracker, timeout_s=START_TIMEOUT_S)
        at_tracker = ["--tracker", str(tracker.url)]
        gateway = children.start(
            "gateway", ["gateway", *at_tracker, "--port", str(plan.api_port), "--insecure", *plan.gateway_options]
        )
        for index, layers in enumerate(plan.splits, start=1):
            arguments = ["node", plan.model, "--layers", str(layers), *at_tracker, "--port", "0", "--insecure"]
            arguments += ["--name", f"node-{index}", "--threads", str(plan.threads), *plan.node_options]
            self.nodes.append(
                children.start(f"node-{index}", arguments, shared_cores(len(plan.splits), plan.threads, index - 1))
            )
        children.wait_ready(gateway, timeout_s=START_TIMEOUT_S)
        self.api_url = str(gateway.url)
        children.wait_ready(*self.nodes)
        children.wait(self._whole, what="joining the nodes to a whole model", timeout_s=START_TIMEOUT_S)
        self._show = _show_nothing

    def watch(self) -> None:
        """Look after the processes until one of them ends, which raises `CommandFailedError`."""
        self._children.wait(lambda: False, what="serving")

    def look(self) -> None:
        """Raises `CommandFailedError` if one of the processes has ended."""
        self._children.look()

    def status(self) -> dict[str, Any]:
        """The gateway's ``/v1/meshnet/status``."""
        return ask(self.api_url, "/meshnet/status")

    def _whole(self) -> bool:
        return any(model["complete"] for model in self.status()["models"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._children.stop()
        if isinstance(error, MeshnetError):
            error.message += f"\nThe logs of all parts are in {self.folder}"
        else:
            shutil.rmtree(self.folder, ignore_errors=True)


def _show_nothing(name: str, line: str) -> None:
    """Once all is ready, what children write is in their logs alone."""


def _cores() -> list[int]:
    """The cores that this process may use, by the system's numbers."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))


def shared_cores(nodes: int, threads: int, index: int) -> dict[str, str]:
    """Environment of node ``index``, from 0, of ``nodes`` that share this machine's cores.

    OpenMP's threads spin for a while after each operation, waiting for the next. With one node that is quick; with
    several on the same cores the idle ones spin on the cores that the working one needs, and to sleep at once costs a
    wake-up for each of a step's hundreds of operations, which is dearest when nobody else keeps the cores awake: while
    the others wait for a slow link, say. Where the threads of all nodes are more than the cores, waiting threads spin
    for some tenths of a millisecond: through a step, not far beyond it (`benchmarks.wait_policy`, `benchmarks/LOG.md`).

    Each thread stays on one core there, too, and the nodes begin at different ones. The threads of a step wait for each
    other hundreds of times; where the system may move them, it puts two of one step on one core now and then, while the
    other core has a thread of another node that only spins.

    GOMP_SPINCOUNT is for GNU's OpenMP, which torch brings on Linux; KMP_BLOCKTIME for LLVM's, on macOS, which has no
    way to choose cores. What is set in this process's environment already, stays.
    """
    cores = _cores()
    if threads == 1 or nodes * threads <= len(cores):
        return {}
    settings = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "0"}
    if sys.platform == "linux" and not {"OMP_PROC_BIND", "OMP_PLACES"} & os.environ.keys():
        rounds, first = divmod(index * threads, len(cores))
        first = (first + rounds) % len(cores)
        settings["GOMP_CPU_AFFINITY"] = " ".join(map(str, cores[first:] + cores[:first]))
    return {name: value for name, value in settings.items() if name not in os.environ}


def ask(api_url: str, path: str) -> dict[str, Any]:
    """One JSON object from a gateway on this machine.

    Raises:
        CommandFailedError: it does not answer, or not with that.
    """
    host, _, rest = api_url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=ASK_TIMEOUT_S)  # never through a proxy
    try:
        connection.request("GET", f"/{rest}{path}", headers=access.headers_with(access.client_key()))
        response = connection.getresponse()
        document = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CommandFailedError(f"the gateway at {api_url} does not answer: {error}") from error
    finally:
        connection.close()
    if response.status != 200 or not isinstance(document, dict):
        raise CommandFailedError(f"the gateway at {api_url} answered {path} with status {response.status}")
    return document
