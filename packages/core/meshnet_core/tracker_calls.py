"""One HTTP call to a tracker, and what goes wrong on the way as an error of our tree. Knows no path and no document."""

from __future__ import annotations

import json
import ssl
from typing import Any

import aiohttp

from meshnet_core.connection_words import connection_words
from meshnet_core.errors import InvalidInputError, TrackerUnreachableError, error_from_wire
from meshnet_core.web_address import is_web_address

_REMEDY = "start one with `meshnet tracker`, or give the address of yours with --tracker"


class TrackerCalls:
    """Calls one tracker; made outside or inside an event loop, used inside one, closed by :meth:`close`.

    Args:
        url: the tracker's, such as ``http://10.0.0.5:7400``.
        timeout_s: seconds for one call, from dialling to the last byte.
        tls: what to show and to accept (`Credentials.client_context`); None for plain HTTP.

    Raises:
        InvalidInputError: if ``url`` is none, or of a tracker that speaks TLS where this machine has no ``tls`` or the
            other way round.
    """

    def __init__(self, url: str, timeout_s: float, tls: ssl.SSLContext | None) -> None:
        if not is_web_address(url):
            raise InvalidInputError(f"a tracker's address is a URL such as http://127.0.0.1:7400, not {url!r}")
        check_scheme(url, tls)
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections; idempotent."""
        session, self._session = self._session, None  # at once: a call that comes meanwhile must not find it closed
        if session is not None:
            await session.close()

    async def call(
        self,
        method: str,
        path: str,
        document: dict[str, Any] | None = None,
        params: dict[str, str] | None = None,
        *,
        more_s: float = 0.0,
    ) -> dict[str, Any]:
        """The document that the tracker answers with.

        Args:
            method, path, params: of the request.
            document: its body, if it has one.
            more_s: seconds beyond the usual that the tracker may take.

        Raises:
            TrackerUnreachableError: nothing that is a tracker answers in time.
            MeshnetError: what the tracker refused with.
        """
        timeout_s = self._timeout_s + more_s
        try:
            status, text = await self._exchange(method, path, document, params, timeout_s)
        except TimeoutError as error:
            raise TrackerUnreachableError(
                f"the tracker at {self.url} gave no answer within {timeout_s:g} s; {_REMEDY}"
            ) from error
        except (aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
            raise TrackerUnreachableError(
                f"no tracker answers at {self.url} ({connection_words(error)}); {_REMEDY}"
            ) from error
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise self.no_tracker(f"status {status}, {text[:80]!r}")
        if status == 200:
            return reply
        body = reply.get("error")
        if not isinstance(body, dict) or not isinstance(body.get("code"), str):  # a gateway's look alike
            raise self.no_tracker(f"status {status}, {text[:80]!r}")
        raise error_from_wire(reply, fallback=text)

    async def _exchange(self, *request: Any) -> tuple[int, str]:
        try:
            return await self._exchange_once(*request)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            # A kept-alive connection that a restarted tracker no longer knows. Every call may be repeated.
            return await self._exchange_once(*request)

    async def _exchange_once(
        self,
        method: str,
        path: str,
        document: dict[str, Any] | None,
        params: dict[str, str] | None,
        timeout_s: float,
    ) -> tuple[int, str]:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._tls or True))
        async with self._session.request(
            method,
            self.url + path,
            json=document,
            params=params,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        ) as response:
            return response.status, await response.text()

    def no_tracker(self, seen: str) -> TrackerUnreachableError:
        """What answers there says what no tracker would."""
        return TrackerUnreachableError(f"what answers at {self.url} is no meshnet tracker: {seen}; {_REMEDY}")


def check_scheme(url: str, tls: ssl.SSLContext | None) -> None:
    """That ``url`` is one for a machine with or without an identity in a mesh.

    Raises:
        InvalidInputError: it is not; the message says what would be.
    """
    if url.startswith("https://") and tls is None:
        raise InvalidInputError(
            f"{url} is of a mesh, and this machine is in none: get a ticket with `meshnet mesh ticket` where the mesh "
            "was made, and run `meshnet join TICKET` here"
        )
    if url.startswith("http://") and tls is not None:
        raise InvalidInputError(
            f"{url} is not encrypted, and this machine is in a mesh, whose parts are at https:// addresses; "
            "write that, or leave the mesh aside with --insecure"
        )
