"""A tap on a connection: relays bytes between real processes and keeps what the client side sent.

It reads the wire with parsers of its own (h11, and one of lean streams that follows docs/wire-protocol.md), not
with the codecs under test.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import h11
from benchmarks.relay import Relay, Through, relaying


@dataclass
class TappedRequest:
    """One request as it went over the wire."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""


@dataclass(frozen=True)
class TappedFrame:
    """One frame as it went over the wire, in either form; ``beside`` is what it took beside its body, in bytes."""

    form: str
    session: str
    start_layer: int
    phase: str
    position: int
    seq_len: int
    body: bytes
    beside: int


@dataclass
class WireTap(Relay):
    """Keeps the requests and frames of all connections, in the order in which they were complete."""

    requests: list[TappedRequest] = field(default_factory=list)
    frames: list[TappedFrame] = field(default_factory=list)
    answered_bytes: int = 0

    def to(self, path: str) -> list[TappedRequest]:
        """The requests to ``path``."""
        return [request for request in self.requests if request.path == path]

    def sent_through(self) -> Through:
        parser = _Requests(self.requests, self.frames)

        def read(data: bytes) -> bytes:
            parser.feed(data)
            return data

        return read

    def answered_through(self) -> Through:
        def count(data: bytes) -> bytes:
            self.answered_bytes += len(data)
            return data

        return count


class _Requests:
    """Parses a stream of requests; answers are of no interest, so each request gets a parser of its own."""

    def __init__(self, found: list[TappedRequest], frames: list[TappedFrame]) -> None:
        self._found = found
        self._frames = frames
        self._stream: bytearray | None = None  # once an upgrade was asked for
        self._parser = h11.Connection(h11.SERVER)
        self._current: TappedRequest | None = None

    def feed(self, data: bytes) -> None:
        if self._stream is not None:
            self._stream += data
            self._take_messages(self._stream)
            return
        self._parser.receive_data(data)
        while True:
            event = self._parser.next_event()
            if event is h11.NEED_DATA or event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                return
            if isinstance(event, h11.Request):
                headers = {name.decode().lower(): value.decode() for name, value in event.headers}
                self._current = TappedRequest(event.method.decode(), event.target.decode(), headers)
            elif isinstance(event, h11.Data) and self._current is not None:
                self._current.body += event.data
            elif isinstance(event, h11.EndOfMessage) and self._current is not None:
                self._found.append(self._current)
                if self._current.path == "/hop/forward":
                    self._frames.append(_posted(self._current))
                rest, _ = self._parser.trailing_data
                if "upgrade" in self._current.headers:
                    self._stream = bytearray(rest)
                    return
                self._parser = h11.Connection(h11.SERVER)
                if rest:
                    self._parser.receive_data(rest)

    def _take_messages(self, stream: bytearray) -> None:
        while len(stream) >= 4 and len(stream) >= (end := 4 + int.from_bytes(stream[:4], "little")):
            self._frames.append(_streamed(bytes(stream[:end])))
            del stream[:end]


def _posted(request: TappedRequest) -> TappedFrame:
    named = {name.removeprefix("x-meshnet-"): value for name, value in request.headers.items()}
    lines = [
        f"{request.method} {request.path} HTTP/1.1",
        *(f"{name}: {value}" for name, value in request.headers.items()),
    ]
    return TappedFrame(
        form="http",
        session=named["session"],
        start_layer=int(named["start-layer"]),
        phase=named["phase"],
        position=int(named["position"]),
        seq_len=int(named["seq-len"]),
        body=request.body,
        beside=sum(len(line) + 2 for line in lines) + 2,
    )


def _streamed(message: bytes) -> TappedFrame:
    """A frame of a lean stream: its length's four bytes included."""

    def number(at: int) -> int:
        return int.from_bytes(message[at : at + 4], "little")

    assert message[4] == 1, "only frames are sent to a hop"
    body_at = 44 + message[40] + int.from_bytes(message[42:44], "little")
    return TappedFrame(
        form="stream",
        session=message[44 : 44 + message[40]].decode(),
        start_layer=number(20),
        phase=("prefill", "resume", "decode", "verify")[message[6]],
        position=number(24),
        seq_len=number(28),
        body=message[body_at:],
        beside=body_at,
    )


def wire_tap(target_port: int) -> AbstractAsyncContextManager[WireTap]:
    """A tap on a free port of its own; what listens at ``target_port`` may come later."""
    return relaying(WireTap(target_port))
