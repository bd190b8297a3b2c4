"""A tap on a connection: relays bytes between real processes and keeps what the client side sent, as HTTP requests.

It reads the wire with a parser of its own (h11), not with the codec under test.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import h11


@dataclass
class TappedRequest:
    """One request as it went over the wire."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""


@dataclass
class WireTap:
    """Listens at ``port``, relays to ``target_port``, both on loopback."""

    target_port: int
    port: int = 0
    requests: list[TappedRequest] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def to(self, path: str) -> list[TappedRequest]:
        """The requests to ``path``, in the order in which they were complete."""
        return [request for request in self.requests if request.path == path]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        back = asyncio.create_task(_relay(up_reader, writer))
        self._tasks.add(back)
        back.add_done_callback(self._tasks.discard)
        parser = _Requests(self.requests)
        try:
            while data := await reader.read(65536):
                parser.feed(data)
                up_writer.write(data)
                await up_writer.drain()
        except ConnectionError:
            pass
        finally:
            up_writer.close()


class _Requests:
    """Parses a stream of requests; answers are of no interest, so each request gets a parser of its own."""

    def __init__(self, found: list[TappedRequest]) -> None:
        self._found = found
        self._parser = h11.Connection(h11.SERVER)
        self._current: TappedRequest | None = None

    def feed(self, data: bytes) -> None:
        self._parser.receive_data(data)
        while True:
            event = self._parser.next_event()
            if event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed):
                return
            if isinstance(event, h11.Request):
                headers = {name.decode().lower(): value.decode() for name, value in event.headers}
                self._current = TappedRequest(event.method.decode(), event.target.decode(), headers)
            elif isinstance(event, h11.Data) and self._current is not None:
                self._current.body += event.data
            elif isinstance(event, h11.EndOfMessage) and self._current is not None:
                self._found.append(self._current)
                rest, _ = self._parser.trailing_data
                self._parser = h11.Connection(h11.SERVER)
                if rest:
                    self._parser.receive_data(rest)


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def wire_tap(target_port: int) -> AsyncIterator[WireTap]:
    """A tap on a free port of its own; what listens at ``target_port`` may come later."""
    tap = WireTap(target_port)
    server = await asyncio.start_server(tap._serve, "127.0.0.1", 0)
    tap.port = server.sockets[0].getsockname()[1]
    try:
        yield tap
    finally:
        server.close()
        for task in list(tap._tasks):
            task.cancel()
