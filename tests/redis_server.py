"""A real redis-server of a test's own: on a free port, nothing kept on disk, to be killed and started again."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from free_ports import free_port

PATIENCE_S = 30.0
BINARY = shutil.which("redis-server")

needs_redis = pytest.mark.skipif(
    BINARY is None, reason="no redis-server on this machine (Debian: apt-get install redis-server)"
)


@dataclass
class RedisServer:
    """One port; ``process`` is the server that listens there now."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it, empty, and wait until it answers."""
        assert BINARY is not None
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(
                [BINARY, *options, "--dir", str(self.folder)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + PATIENCE_S
        while not self._answers():
            assert self.process.poll() is None, (self.folder / "redis.log").read_text()
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, hung or not."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def hang(self) -> None:
        """It answers no more, but its connections stay."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as sock:
                sock.sendall(b"PING\r\n")
                return sock.recv(16).startswith(b"+PONG")
        except OSError:
            return False


@contextmanager
def redis_server(folder: Path) -> Iterator[RedisServer]:
    """A running server, gone when the block is left."""
    server = RedisServer(folder, free_port())
    server.start()
    try:
        yield server
    finally:
        server.kill()
