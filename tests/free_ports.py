"""Ports for servers that a test starts later, or stops and starts again on the same one."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

LOW, HIGH = 20_000, 32_000  # below those that Linux gives to connections, or one of these would have it by then


def free_port() -> int:
    """A port of loopback that nothing listens on now, and that no connection is given."""
    for port in random.SystemRandom().sample(range(LOW, HIGH), 100):
        with suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"none of 100 ports from {LOW} to {HIGH} is free")
