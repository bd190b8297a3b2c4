"""How long one small binary POST takes on loopback, by HTTP library, and one frame of a lean stream: what ADR-0002 and
ADR-0029 rest on.

Client and server are two processes, one kept-alive connection, one request at a time, as a decode step is. Each request
carries a frame's headers, each reply a small JSON document. Rounds of all cases are interleaved, so that a noisy
neighbour hits all alike. Prints a table and, last, one line of JSON.

    python benchmarks/wire_posts.py [--rounds 7] [--posts 300]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from meshnet_cli import serving
from meshnet_core.clock import SystemClock
from meshnet_core.frames import Frame, FrameReply, HopTiming, Phase
from meshnet_core.http_codec import encode_frame
from meshnet_core.sampling import SampledToken
from meshnet_core.stream_transport import transport_for
from meshnet_core.wire_form import WireForm
from meshnet_node.torch_server import create_app, new_doorkeeper, runner_for


def optional(name: str) -> Any:
    """A library that meshnet itself does not need; cases without it are left out."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


httptools, uvloop, uvicorn = optional("httptools"), optional("uvloop"), optional("uvicorn")

Post = Callable[[], Awaitable[None]]
BODIES = (1152, 3584)  # one bf16 position of SmolLM2-135M (hidden 576) and of a model with hidden 1792
WARM_UP = 50
REPLY = FrameReply(513, (SampledToken(1234),), (HopTiming(0, 0.1, 50.0, 0.3, 50.6, 1152),))
REPLY_JSON = json.dumps(REPLY.to_wire(), separators=(",", ":")).encode()


def frame_of(size: int) -> Frame:
    return Frame("s-" + "0" * 32, 0, 1, 15, Phase.DECODE, 512, 1, 1, 30000, True, bytes(size))


HEADERS, _ = encode_frame(frame_of(BODIES[0]))
HEAD = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())


def request_bytes(body: bytes) -> bytes:
    return f"POST /hop/forward HTTP/1.1\r\nHost: x\r\n{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body


RESPONSE = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(REPLY_JSON)
) + REPLY_JSON


# -- servers: each prints its port and runs until it is killed ------------------------------------------------------


async def serve_aiohttp() -> None:
    async def forward(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=REPLY_JSON, content_type="application/json")

    app = web.Application()
    app.router.add_post("/hop/forward", forward)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


async def serve_meshnet() -> None:
    class Echo:
        async def forward(self, frame: Frame) -> FrameReply:
            return REPLY

    endpoint: Any = Echo()  # nothing but frames is sent to it
    app = create_app(endpoint, boot="b-0", status=dict, text_files=lambda _: None, max_body=1 << 20)
    sock = serving.listen("127.0.0.1", 0)
    async with serving.serving_aiohttp(runner_for(app), sock, None, new_doorkeeper()):
        print(serving.port_of(sock), flush=True)
        await asyncio.Event().wait()


async def serve_uvicorn() -> None:
    async def app(_scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(REPLY_JSON)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": REPLY_JSON})

    # With the protocol named, since asyncio sets TCP_NODELAY only then: `socket.create_server` leaves it 0, and every
    # post takes 44 ms (Nagle's delay against delayed acknowledgements).
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(app, http="httptools", lifespan="off", access_log=False, log_level="error")
    await uvicorn.Server(config).serve([listener])


class Message:
    """What httptools' parsers call back: the headers and body of one message, and whether it is whole."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True


async def read_message(reader: asyncio.StreamReader, parser_of: Callable[[Message], Any]) -> Message:
    message = Message()
    parser = parser_of(message)
    while not message.complete:
        data = await reader.read(65536)
        if not data:
            raise ConnectionResetError
        parser.feed_data(data)
    return message


async def serve_streams() -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                await read_message(reader, httptools.HttpRequestParser)
                writer.write(RESPONSE)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def serve_socket() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, contextlib.suppress(ConnectionError):
            while read_plain(connection):
                connection.sendall(RESPONSE)


def read_plain(connection: socket.socket) -> bytes:
    """One message whose length its Content-Length names; the least that can be done."""
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        if not (more := connection.recv(65536)):
            return b""
        data += more
    at = data.index(b"Content-Length: ") + 16
    whole = end + 4 + int(data[at : data.index(b"\r", at)])
    while len(data) < whole:
        data += connection.recv(65536)
    return data


SERVERS = {"aiohttp": serve_aiohttp, "meshnet": serve_meshnet, "uvicorn": serve_uvicorn, "streams": serve_streams}


# -- clients: each yields a coroutine function that makes one post --------------------------------------------------


@contextlib.asynccontextmanager
async def aiohttp_client(port: int, size: int) -> AsyncIterator[Post]:
    async with aiohttp.ClientSession() as session:
        url, body = f"http://127.0.0.1:{port}/hop/forward", bytes(size)

        async def post() -> None:
            async with session.post(url, data=body, headers=HEADERS) as response:
                await response.read()

        yield post


@contextlib.asynccontextmanager
async def meshnet_client(port: int, size: int) -> AsyncIterator[Post]:
    async with shipped_client(WireForm.HTTP, port, size) as post:
        yield post


@contextlib.asynccontextmanager
async def lean_client(port: int, size: int) -> AsyncIterator[Post]:
    async with shipped_client(WireForm.STREAM, port, size) as post:
        yield post


@contextlib.asynccontextmanager
async def shipped_client(form: WireForm, port: int, size: int) -> AsyncIterator[Post]:
    transport, url, frame = transport_for(form, SystemClock()), f"http://127.0.0.1:{port}", frame_of(size)

    async def post() -> None:
        await transport.forward(url, frame)

    yield post
    await transport.close()


@contextlib.asynccontextmanager
async def streams_client(port: int, size: int) -> AsyncIterator[Post]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = request_bytes(bytes(size))

    async def post() -> None:
        writer.write(data)
        await read_message(reader, httptools.HttpResponseParser)

    yield post
    writer.close()


CLIENTS = {
    "aiohttp": aiohttp_client,
    "meshnet": meshnet_client,
    "meshnet, lean": lean_client,
    "streams": streams_client,
}


# -- cases ----------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    client: str
    server: str
    loop: str
    size: int
    port: int = 0
    rounds: list[list[float]] = field(default_factory=list)

    def quantile(self, q: float) -> float:
        """Median over the rounds of each round's quantile, in ms."""
        return 1000 * statistics.median(sorted(times)[int(q * len(times))] for times in self.rounds)

    def best(self) -> float:
        """The quietest round's median, in ms: what is left where neighbours were idle."""
        return 1000 * min(statistics.median(times) for times in self.rounds)


def loop_factory(loop: str) -> Callable[[], asyncio.AbstractEventLoop]:
    return uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop


async def time_posts(case: Case, posts: int) -> list[float]:
    times = []
    async with CLIENTS[case.client](case.port, case.size) as post:
        for index in range(WARM_UP + posts):
            began = time.perf_counter()
            await post()
            if index >= WARM_UP:
                times.append(time.perf_counter() - began)
    return times


def time_socket_posts(case: Case, posts: int) -> list[float]:
    times = []
    data = request_bytes(bytes(case.size))
    with socket.create_connection(("127.0.0.1", case.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for index in range(WARM_UP + posts):
            began = time.perf_counter()
            connection.sendall(data)
            read_plain(connection)
            if index >= WARM_UP:
                times.append(time.perf_counter() - began)
    return times


def cases() -> list[Case]:
    loops = ["asyncio"] + (["uvloop"] if uvloop else [])
    pairs = [("aiohttp", "aiohttp"), ("meshnet", "meshnet"), ("meshnet, lean", "meshnet")]
    if uvicorn and httptools:
        pairs.append(("aiohttp", "uvicorn"))
    if httptools:
        pairs.append(("streams", "streams"))
    found = [Case("socket", "socket", "-", size) for size in BODIES]
    return found + [Case(client, server, loop, size) for client, server in pairs for loop in loops for size in BODIES]


def measure(rounds: int, posts: int) -> list[Case]:
    found = cases()
    with contextlib.ExitStack() as stack:
        ports: dict[tuple[str, str], int] = {}
        for server, loop in {(case.server, case.loop): None for case in found}:
            child = subprocess.Popen(
                [sys.executable, __file__, "--serve", server, "--loop", loop], stdout=subprocess.PIPE, text=True
            )
            stack.callback(child.wait)
            stack.callback(child.kill)
            assert child.stdout is not None
            stack.callback(child.stdout.close)
            ports[server, loop] = int(child.stdout.readline())
        for _ in range(rounds):
            for case in found:
                case.port = ports[case.server, case.loop]
                if case.client == "socket":
                    case.rounds.append(time_socket_posts(case, posts))
                    continue
                with asyncio.Runner(loop_factory=loop_factory(case.loop)) as runner:
                    case.rounds.append(runner.run(time_posts(case, posts)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Round trips of small binary POSTs on loopback, by HTTP library.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--posts", type=int, default=300, help="timed posts per case and round")
    parser.add_argument("--serve", choices=["socket", *SERVERS], help=argparse.SUPPRESS)
    parser.add_argument("--loop", default="asyncio", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve == "socket":
        serve_socket()
    elif options.serve:
        with asyncio.Runner(loop_factory=loop_factory(options.loop)) as runner:
            runner.run(SERVERS[options.serve]())
    else:
        report(measure(options.rounds, options.posts), options)


def report(found: list[Case], options: argparse.Namespace) -> None:
    floor = {case.size: case.quantile(0.5) for case in found if case.client == "socket"}
    print(f"{'client -> server':24} {'loop':8} {'bytes':>6} {'p50 ms':>8} {'p95 ms':>8} {'best ms':>8} {'x floor':>8}")
    rows = []
    for case in sorted(found, key=lambda case: (case.size, case.quantile(0.5))):
        p50, p95, best = case.quantile(0.5), case.quantile(0.95), case.best()
        name = f"{case.client} -> {case.server}"
        ratio = p50 / floor[case.size]
        print(f"{name:24} {case.loop:8} {case.size:6} {p50:8.3f} {p95:8.3f} {best:8.3f} {ratio:8.1f}")
        row = {"client": case.client, "server": case.server, "loop": case.loop, "body_bytes": case.size}
        rows.append(row | {"p50_ms": round(p50, 4), "p95_ms": round(p95, 4), "best_ms": round(best, 4)})
    machine = {"python": platform.python_version(), "system": platform.platform(), "cpus": os.cpu_count()}
    versions = {"aiohttp": aiohttp.__version__}
    for module in (httptools, uvloop, uvicorn):
        if module is not None:
            versions[module.__name__] = module.__version__
    document = {"benchmark": "wire_posts", "rounds": options.rounds, "posts": options.posts}
    print(json.dumps(document | {"machine": machine, "versions": versions, "rows": rows}))


if __name__ == "__main__":
    main()
