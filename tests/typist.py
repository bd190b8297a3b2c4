"""Types what a page of the docs tells people to type, line by line as it stands, on hosts that are network namespaces.

The names and addresses that pages use lead to those hosts, by a `hosts` file of their own. What serves is left running
once it is ready; what ends is waited for and must end well.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import smollm2
from documents import TypedBlock, bare
from meshnet_process import MESHNET, wait_until
from network_namespaces import Host, hosts, missing

PATIENCE_S = 600.0
NAMES = {"kitchen": ("kitchen.example", "home.example"), "study": ()}
READY = {"meshnet": "ready http", "redis-server": "Ready to accept connections"}
SERVING = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:(meshnet) (?:up|tracker|node|gateway)\b|(redis-server)\b)")
CALLED = 'mount --bind "$1" /etc/hosts && hostname "$0" && shift && exec "$@"'
"""Within the mount namespace that `ip netns exec` makes."""


@dataclass
class Server:
    """A command that was left running."""

    line: str
    process: subprocess.Popen[bytes]
    log: Path
    ready: str

    def said(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def wait_ready(self) -> None:
        def said() -> bool:
            assert self.process.poll() is None, f"{self.line}\n{self.said()}"
            return self.ready in self.said()

        wait_until(said, PATIENCE_S)


@dataclass
class Typist:
    """``said`` has what each command that ended wrote to stdout, by its line and in order."""

    network: Mapping[str, Host]
    folder: Path
    excused: Mapping[str, str] = field(default_factory=dict)
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    said: list[tuple[str, str]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=lambda: {"MESHNET_CHAT_TEMPERATURE": "0"})  # none rambles on
    _running: list[Server] = field(default_factory=list)
    _started: int = 0

    def type_block(self, block: TypedBlock, host: str, others: Mapping[str, str] | None = None) -> None:
        """Type its lines on a host, but on those that comments within it name (`# on study`), or ``others`` of single
        lines; what it shows must be said."""
        for line in block.lines:
            if found := re.fullmatch(r"# on (\w+)", line):
                host = found[1]
            elif not line.startswith("#") and bare(line) not in self.excused:
                self.type(line, (others or {}).get(bare(line), host))
                if shown := block.said(line):
                    assert self.said[-1] == (line, shown)

    def type(self, line: str, host: str) -> None:
        """One line; an exported variable holds on every host from then on."""
        if found := re.match(r"export (.*)", line):
            self._export(found[1])
            return
        script = self._script(line)
        if found := SERVING.match(line):
            self._start(line, script, self.network[host], READY[found[1] or found[2]])
            return
        done = subprocess.run(
            self._within(self.network[host], script),
            input="",
            env=self._variables(self.network[host]),
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        logs = [(server.line, server.said()[-2000:]) for server in self._running]
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}\n{logs}"
        assert "Traceback" not in done.stderr, f"{line}\n{done.stderr}"
        self.said.append((line, done.stdout.strip()))

    def look(self) -> None:
        """What was left running runs, and nothing went wrong within it."""
        for server in self._running:
            assert server.process.poll() is None, f"{server.line}\n{server.said()}"
            assert "Traceback" not in server.said(), f"{server.line}\n{server.said()}"

    def stop(self) -> None:
        """Stop all that runs, the newest first."""
        for server in reversed(self._running):
            server.process.terminate()
        deadline = time.monotonic() + 60
        for server in self._running:
            try:
                server.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.process.wait()
        self._running.clear()

    def _export(self, assignments: str) -> None:
        script = f"export {assignments}; env -0"
        told = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
        values = dict(one.split("=", 1) for one in told.split("\0") if "=" in one)
        self.environment |= {name: values[name] for name in re.findall(r"(?:^|\s)(\w+)=", assignments)}

    def _script(self, line: str) -> str:
        """What a shell is given: this checkout's program, the ticket that was printed last, and what stands in for a
        reader's own."""
        if re.search(r"\bTICKET\b", line):
            tickets = re.findall(r"^meshnet-\S+$", "\n".join(text for _, text in self.said), re.MULTILINE)
            line = re.sub(r"\bTICKET\b", tickets[-1], line)
        line = bare(line)
        for own, other in self.stand_ins.items():
            line = line.replace(own, other)
        line = re.sub(r"^((?:[A-Z_]+=\S+ )*)", r"\1exec ", line, count=1)
        return re.sub(r"\bexec (meshnet|python)\b", lambda found: f"exec {PROGRAMS[found[1]]}", line, count=1)

    def _within(self, host: Host, script: str) -> Sequence[str]:
        names = self.folder / "hosts"
        entries = [f"{one.address} {' '.join((one.name, *NAMES[one.name]))}" for one in self.network.values()]
        names.write_text("\n".join(["127.0.0.1 localhost", *entries, ""]))
        return ("ip", "netns", "exec", host.namespace, "unshare", "--uts", "sh", "-c", CALLED, host.name, str(names),
                "bash", "-c", script)  # fmt: skip

    def _variables(self, host: Host) -> dict[str, str]:
        return os.environ | {"MESHNET_HOME": str(host.home), "COLUMNS": "150"} | self.environment

    def _start(self, line: str, script: str, host: Host, ready: str) -> None:
        self._started += 1
        log = self.folder / f"{self._started}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                self._within(host, script),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._variables(host),
                cwd=self.folder,
            )
        server = Server(line, process, log, ready)
        self._running.append(server)
        server.wait_ready()


PROGRAMS = {"meshnet": " ".join(MESHNET), "python": sys.executable}


@contextmanager
def typist(folder: Path, **given: Mapping[str, str]) -> Iterator[Typist]:
    """One at two hosts, kitchen and study, with an empty folder to type in; skips where there can be no hosts."""
    if (lacks := missing()) is not None:
        pytest.skip(lacks)
    for program, package in {"unshare": "util-linux", "curl": "curl", "openssl": "openssl"}.items():
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program} here (Debian: {package})")
    smollm2.gguf_path()  # skips where the model is not there
    (desk := folder / "desk").mkdir()
    with hosts(folder, list(NAMES)) as network:
        one = Typist(network, desk, **given)
        try:
            yield one
        finally:
            one.stop()
