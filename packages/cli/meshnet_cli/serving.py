"""Listening on a port and serving until told to stop: the part that tracker, node and gateway share."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn
from urllib.parse import urlsplit

from meshnet_cli.complaint import CommandFailedError
from meshnet_core.errors import InvalidInputError
from meshnet_core.json_log import AboutFilter, JsonLines

if TYPE_CHECKING:
    from aiohttp import web
    from fastapi import FastAPI

    from meshnet_core.doorkeeper import Doorkeeper

BACKLOG = 512
KEEPALIVE_S = 75  # above what clients and proxies use, so that it is they who close an idle connection
SHUTDOWN_S = 2.0  # for requests under way when a server stops
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_FORMATS = ("text", "json")
_OUR_LOGGERS = ("meshnet", "meshnet_core", "meshnet_tracker", "meshnet_node", "meshnet_gateway", "meshnet_cli")
_ANY_ADDRESS = {"0.0.0.0", "::"}  # noqa: S104 - told apart here, not listened on


def listen(host: str, port: int, *, option: str = "--port") -> socket.socket:
    """A listening socket; taken at once, so that a port in use is known before a model is loaded for a minute.

    Raises:
        InvalidInputError: if ``host`` is no address of this machine, or the port is taken or not allowed; the message
            names ``option``.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:  # the latter of a name that cannot even be asked for
        raise InvalidInputError(f"--host {host!r} cannot be resolved; give an address of this machine") from error
    family, kind, protocol, _, address = found[0]
    # With the protocol named: only then does asyncio set TCP_NODELAY on what is accepted, and a stream's tokens do not
    # wait for each other's acknowledgements.
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise InvalidInputError(
                f"port {port} on {host} is taken, perhaps by another meshnet; choose another with {option}, "
                "or 0 for any free one"
            ) from error
        if error.errno == errno.EACCES:
            raise InvalidInputError(f"port {port} needs rights that this user lacks; choose one above 1023") from error
        raise InvalidInputError(
            f"cannot listen on --host {host}: {error.strerror}; give an address of this machine"
        ) from error
    sock.setblocking(False)
    return sock


def listen_from(host: str, first_port: int, count: int = 100) -> socket.socket:
    """A listening socket on the first free port of ``count`` from ``first_port`` on.

    Raises:
        InvalidInputError: if none is free, or as :func:`listen`.
    """
    for port in range(first_port, first_port + count - 1):
        try:
            return listen(host, port)
        except InvalidInputError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
                raise
    return listen(host, first_port + count - 1)


def port_of(sock: socket.socket) -> int:
    """The port that a socket got."""
    return int(sock.getsockname()[1])


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """``http://host:port``, with the brackets that an IPv6 address needs."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def reachable_url(host: str, port: int, *, towards: str, scheme: str = "http") -> str:
    """Where others dial a server that listens on ``host``.

    A server that listens on all addresses is dialled at the one from which this machine reaches ``towards``, a URL.
    """
    if host not in _ANY_ADDRESS:
        return url_of(host, port, scheme)
    target = urlsplit(towards)
    family = socket.AF_INET6 if host == "::" else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target.hostname or "localhost", target.port or 80))  # UDP: sends nothing, picks the address
            return url_of(probe.getsockname()[0], port, scheme)
    except OSError as error:
        raise CommandFailedError(
            f"cannot tell at which address others reach this machine ({error.strerror}); say it with --advertise URL"
        ) from error


def addresses_of(host: str) -> list[str]:
    """IPv4 addresses at which other machines may reach a server that listens on ``host``."""
    import ifaddr

    if host not in _ANY_ADDRESS:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(host, None, socket.AF_INET)})
    addresses = (ip.ip for adapter in ifaddr.get_adapters() for ip in adapter.ips if ip.is_IPv4)
    parsed = sorted(ipaddress.IPv4Address(address) for address in addresses if isinstance(address, str))
    return [str(address) for address in parsed if not address.is_loopback and not address.is_link_local]


def set_up_logging() -> None:
    """Our own log from INFO on, other libraries' from WARNING on, to stderr; MESHNET_LOG sets our level.

    With MESHNET_LOG_FORMAT=json each line is a JSON object (`meshnet_core.json_log`).

    Raises:
        InvalidInputError: if MESHNET_LOG is no level, or MESHNET_LOG_FORMAT no format.
    """
    level = os.environ.get("MESHNET_LOG", "INFO").upper()
    if level not in _LEVELS:
        raise InvalidInputError(f"MESHNET_LOG={level} is no level; write one of {', '.join(_LEVELS)}")
    form = os.environ.get("MESHNET_LOG_FORMAT", "text").lower()
    if form not in _FORMATS:
        raise InvalidInputError(f"MESHNET_LOG_FORMAT={form} is no format; write one of {', '.join(_FORMATS)}")
    handler = logging.StreamHandler()
    handler.addFilter(AboutFilter())
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else text)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for name in _OUR_LOGGERS:
        logging.getLogger(name).setLevel(level)


def say_ready(url: str) -> None:
    """The line that people and `meshnet up` wait for."""
    print(f"ready {url}", flush=True)


@asynccontextmanager
async def serving_aiohttp(
    runner: web.AppRunner, sock: socket.socket, tls: ssl.SSLContext | None, doorkeeper: Doorkeeper
) -> AsyncIterator[None]:
    """Serve an aiohttp application on a listening socket while the block runs; ``tls`` of None is plain HTTP."""
    from meshnet_core.secure_site import SecureSite

    await runner.setup()
    try:
        await SecureSite(runner, sock, tls, doorkeeper).start()
        yield
    finally:
        await runner.cleanup()


class TlsFiles(NamedTuple):
    """A certificate chain and its private key, PEM."""

    certificate: Path
    key: Path


def tls_files(certificate: Path | None, key: Path | None) -> TlsFiles | None:
    """What to serve HTTPS with; None for HTTP.

    Raises:
        InvalidInputError: one is given without the other, or they are unusable.
    """
    if certificate is None or key is None:
        if certificate is not None or key is not None:
            raise InvalidInputError("--tls-certificate and --tls-key belong together; give both or neither")
        return None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidInputError(f"--tls-certificate {certificate} and --tls-key cannot be used: {error}") from error
    return TlsFiles(certificate, key)


@asynccontextmanager
async def serving_asgi(app: FastAPI, sock: socket.socket, tls: TlsFiles | None = None) -> AsyncIterator[None]:
    """Serve an ASGI app on a listening socket while the block runs; over HTTPS with ``tls``."""
    import uvicorn

    from meshnet_cli.cut_bodies import AnsweringProtocol

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # the command handles them; uvicorn's handlers would replace its own

    config = uvicorn.Config(
        app,
        http=AnsweringProtocol,
        log_config=None,  # ours stays
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_keep_alive=KEEPALIVE_S,
        timeout_graceful_shutdown=int(SHUTDOWN_S),
        ssl_certfile=None if tls is None else tls.certificate,
        ssl_keyfile=None if tls is None else tls.key,
    )
    server = Server(config)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        while not server.started:
            if task.done():
                task.result()
                raise CommandFailedError("the HTTP server ended while starting")
            await asyncio.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        await task


def stop_event() -> asyncio.Event:
    """An event that SIGINT and SIGTERM set; call it in the running loop."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    return stopped


class StopSignals:
    """``first`` is set by the first SIGINT or SIGTERM, ``second`` by any further one; make it in the running loop."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._told)

    def _told(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


def leave_at_once() -> NoReturn:
    """End this process, which has closed all that is to be closed, with exit code 0.

    Taking a Python apart that has torch and transformers loaded takes seconds in the garbage collector, to no end.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
