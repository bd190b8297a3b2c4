"""A `meshnet` command as a real process, for tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

MESHNET = (sys.executable, "-P", "-m", "meshnet_cli")
READY = re.compile(r"^ready (\S+)$", re.MULTILINE)


@dataclass
class MeshnetProcess:
    """One running command; what it writes is in ``log``."""

    process: subprocess.Popen[bytes]
    log: Path

    def output(self) -> str:
        return self.log.read_text()

    def ready(self, seconds: float = 90) -> str:
        """The URL of its ready line."""

        def said() -> bool:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output()}"
            return READY.search(self.output()) is not None

        wait_until(said, seconds)
        found = READY.search(self.output())
        assert found is not None
        return found[1]

    def children(self) -> list[psutil.Process]:
        return list(psutil.Process(self.process.pid).children(recursive=True))

    def stop(self, number: int = signal.SIGTERM, seconds: float = 60) -> int:
        """Send a signal and wait for the exit code."""
        self.process.send_signal(number)
        return self.process.wait(seconds)


@contextmanager
def running(
    log: Path, *arguments: str, program: Sequence[str] = MESHNET, **environment: str
) -> Iterator[MeshnetProcess]:
    """Run ``meshnet`` with ``arguments`` while the block runs; its temporary folders are beside the log."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(log.parent)} | environment,
        )
    try:
        yield MeshnetProcess(process, log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run(*arguments: str, stdin: str = "", seconds: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``meshnet`` to its end."""
    return subprocess.run(
        [*MESHNET, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env=os.environ | environment,
    )


def wait_until(done: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.05)


def all_gone(processes: list[psutil.Process]) -> bool:
    """Whether none of them runs any more; one that only waits to be reaped does not."""
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)
