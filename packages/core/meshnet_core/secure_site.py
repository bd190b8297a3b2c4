"""Listens for an aiohttp application and sees each connection in, so that those that fail are told and counted.

asyncio's own server drops a failed handshake without a word. Knows neither paths nor requests.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections import Counter

from aiohttp import web

from meshnet_core.credentials import WatchedSSLObject
from meshnet_core.doorkeeper import Doorkeeper, owner_in, reason_of

HANDSHAKE_S = 10.0
MAX_HANDSHAKES = 512  # under way at once
MAX_HANDSHAKES_EACH = 64  # of one address
_OUT_OF_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

logger = logging.getLogger(__name__)


class SecureSite(web.BaseSite):
    """One listening socket of a runner.

    Args:
        runner: set up already; its cleanup stops this site too.
        sock: bound and listening, not blocking.
        tls: from `Credentials.server_context`; None for plain HTTP.
        doorkeeper: told of who is turned away.
    """

    def __init__(
        self, runner: web.BaseRunner, sock: socket.socket, tls: ssl.SSLContext | None, doorkeeper: Doorkeeper
    ) -> None:
        super().__init__(runner, ssl_context=tls)
        self._sock = sock
        self._doorkeeper = doorkeeper
        self._under_way: Counter[str] = Counter()
        self._greetings: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        host, port = self._sock.getsockname()[:2]
        return f"{'https' if self._ssl_context else 'http'}://{host}:{port}"

    async def start(self) -> None:
        await super().start()
        self._accepting = asyncio.create_task(self._accept(), name=f"accept {self.name}")

    async def stop(self) -> None:
        tasks = [*self._greetings, *([self._accepting] if self._accepting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sock.close()
        await super().stop()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._sock)
            except OSError as error:
                if error.errno in _OUT_OF_FILES:
                    logger.warning("no connection can be taken: %s", error.strerror)
                await asyncio.sleep(1.0 if error.errno in _OUT_OF_FILES else 0.0)  # else: it broke while it waited
                continue
            peer = str(address[0])
            if self._under_way.total() >= MAX_HANDSHAKES or self._under_way[peer] >= MAX_HANDSHAKES_EACH:
                connection.close()
                self._doorkeeper.turn_away("too_many", peer)
                continue
            self._under_way[peer] += 1
            task = asyncio.create_task(self._greet(connection, peer))
            self._greetings.add(task)
            task.add_done_callback(self._greetings.discard)

    async def _greet(self, connection: socket.socket, peer: str) -> None:
        """The handshake, where there is one; then the connection is the runner's."""
        tls, server = self._ssl_context, self._runner.server
        if server is None:
            raise RuntimeError("the runner was cleaned up before its site was stopped")
        try:
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                server, connection, ssl=tls, ssl_handshake_timeout=None if tls is None else HANDSHAKE_S
            )
        except OSError as error:  # ssl.SSLError and a timeout's ConnectionAbortedError are such
            if tls is not None:
                self._doorkeeper.turn_away(reason_of(error), peer, _words(error))
            return
        finally:
            self._under_way[peer] -= 1
            if not self._under_way[peer]:
                del self._under_way[peer]
        watched = transport.get_extra_info("ssl_object")
        if isinstance(watched, WatchedSSLObject):
            watched.on_broken = lambda error: self._doorkeeper.turn_away(reason_of(error), peer, _words(error))
            if watched.broken is not None:
                watched.on_broken(watched.broken)


def owner_of_request(request: web.BaseRequest) -> str | None:
    """The owner id of whoever sent a request; None where it came without a certificate."""
    found = request.get_extra_info("ssl_object")
    return owner_in(found if isinstance(found, ssl.SSLObject) else None)


def _words(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return str(error) or type(error).__name__
