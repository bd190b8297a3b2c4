"""Hosts on one local network, each a network namespace of this machine: own interfaces, own loopback, own processes.

    switch (a namespace with a bridge) --veth-- head 10.213.0.1
                                       --veth-- a    10.213.0.2 ...

Needs Linux, iproute2 and root; `missing` says what lacks.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from meshnet_cli.children import MESHNET, Child, Children

Result = TypeVar("Result")
CLONE_NEWNET = 0x40000000
_SWITCH = "switch"


def missing() -> str | None:
    """Why there can be no namespaces here; None where there can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, this is {sys.platform}"
    if shutil.which("ip") is None:
        return "there is no `ip` command (Debian: iproute2)"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    name = f"mn-{secrets.token_hex(3)}"
    for command in (f"netns add {name}", f"-n {name} link add probe type veth peer name peer", f"netns del {name}"):
        done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
        if done.returncode:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            return f"no network namespace can be made here: {done.stderr.strip()}"
    return None


@dataclass
class Host:
    """One of them: ``address`` on the network, ``home`` for what its user keeps."""

    name: str
    namespace: str
    address: str
    home: Path
    _children: Children | None = None
    _running: dict[str, Child] = field(default_factory=dict)

    def meshnet(self, *arguments: str, seconds: float = 240) -> str:
        """Run a ``meshnet`` command on this host to its end; what it wrote to stdout."""
        done = subprocess.run(
            [*self._command, *arguments],
            env=os.environ | {"MESHNET_HOME": str(self.home)},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, name: str, *arguments: str) -> Child:
        """Run a ``meshnet`` command on this host in the background, until the network goes or this host is lost."""
        folder = self.home / f"{len(self._running)}-{name}"
        folder.mkdir(parents=True)
        if self._children is None:
            self._children = Children(self.home, program=self._command)
        child = self._children.start(f"{folder.name}", arguments, {"MESHNET_HOME": str(self.home)})
        self._running[name] = child
        return child

    def wait_ready(self, seconds: float = 120) -> None:
        """Until all that was started here has said that it is ready."""
        assert self._children is not None
        self._children.wait_ready(*self._running.values(), timeout_s=seconds)

    def log(self, name: str) -> str:
        return self._running[name].log.read_text("utf-8", "replace")

    def unplug(self) -> None:
        """Take the cable out: nothing that is sent to it comes back, not even a refusal."""
        _ip("-n", self.namespace, "link", "set", "eth0", "down")

    def call(self, function: Callable[[], Result]) -> Result:
        """Run ``function`` with the sockets that it makes being this host's."""
        results: list[Result] = []
        errors: list[BaseException] = []

        def within() -> None:
            try:
                libc = ctypes.CDLL(None, use_errno=True)
                with Path(f"/run/netns/{self.namespace}").open("rb") as file:
                    assert libc.setns(file.fileno(), CLONE_NEWNET) == 0, ctypes.get_errno()
                results.append(function())
            except BaseException as error:  # noqa: BLE001 - told to whoever waits
                errors.append(error)

        thread = threading.Thread(target=within)  # of its own: the namespace is the thread's until it ends
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def stop(self) -> None:
        if self._children is None:
            return
        for child in self._running.values():
            if child.process.poll() is None:
                child.process.kill()  # nothing of them is wanted, and a polite end waits for drains
                child.process.wait()
        self._children.stop()

    @property
    def _command(self) -> Sequence[str]:
        return ("ip", "netns", "exec", self.namespace, *MESHNET)


@contextmanager
def hosts(folder: Path, names: Sequence[str]) -> Iterator[dict[str, Host]]:
    """Hosts by name on one network; all of it is gone when the block is left."""
    tag = f"mn-{secrets.token_hex(3)}"
    switch = f"{tag}-{_SWITCH}"
    made: dict[str, Host] = {}
    spaces: list[str] = []
    try:
        _ip("netns", "add", switch)
        spaces.append(switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(names, start=1):
            space, address = f"{tag}-{name}", f"10.213.0.{number}"
            _ip("netns", "add", space)
            spaces.append(space)
            _ip("-n", switch, "link", "add", f"p{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", switch, "link", "set", f"p{number}", "master", "br0", "up")
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", space, "link", "set", device, "up")
            _ip("-n", space, "route", "add", "224.0.0.0/4", "dev", "eth0")
            home = folder / name
            home.mkdir(parents=True)
            made[name] = Host(name, space, address, home)
        yield made
    finally:
        for host in made.values():
            host.stop()
        for space in reversed(spaces):
            _ip("netns", "del", space)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
