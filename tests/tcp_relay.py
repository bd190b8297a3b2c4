"""A relay between real processes that can cut every connection at once, as a flapping network does.

It can also record and alter what passes, as somebody on the way could.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from benchmarks.relay import Relay, Through, relaying


@dataclass
class TcpRelay(Relay):
    """`connections` counts all that were ever made.

    `sent` holds what clients sent; ``alter`` may change each piece of it before it is passed on.
    """

    connections: int = 0
    sent: bytearray = field(default_factory=bytearray)
    alter: Through = bytes

    def sent_through(self) -> Through:
        self.connections += 1
        return self._taken

    def _taken(self, data: bytes) -> bytes:
        self.sent += data
        return self.alter(data)


def tcp_relay(target_port: int) -> AbstractAsyncContextManager[TcpRelay]:
    """A relay on a free port of its own."""
    return relaying(TcpRelay(target_port))
