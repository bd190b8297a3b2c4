"""Bytes that are no HTTP, at a tracker's port: a 400, one line in its log at most, and the next request works."""

from __future__ import annotations

import json
import socket
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from meshnet_process import running


@pytest.mark.parametrize(
    "garbage", [bytes(range(1, 256)), b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\nContent-Length: -4\r\n\r\n"]
)
def test_garbage_at_a_trackers_port_is_one_line_in_its_log_at_most(garbage: bytes, tmp_path: Path) -> None:
    with running(tmp_path / "log", "tracker", "--port", "0") as tracker:
        url = tracker.ready()
        target = urlsplit(url)
        with socket.create_connection((target.hostname, target.port), timeout=10) as stranger:
            stranger.sendall(garbage + b"\r\n\r\n")
            assert b" 400 " in stranger.recv(4096).partition(b"\r\n")[0]
        with urllib.request.urlopen(f"{url}/healthz", timeout=10) as response:  # noqa: S310 - our own tracker
            assert json.load(response)["status"] == "ok"
        assert tracker.stop() == 0
    lines = tracker.output().splitlines()
    assert lines[0].startswith("ready ")
    assert len(lines) <= 2  # of some garbage aiohttp says nothing
    assert all("meshnet_tracker.server.connections: not HTTP: " in line for line in lines[1:])
