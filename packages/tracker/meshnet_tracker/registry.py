"""What several trackers of one mesh share: a port, and the address by which a registry is named.

A registry keeps short texts for a while and says which were put. It decides nothing: every text has one writer, and
what several of them mean together is for the trackers to work out (`sharing`), each by the same rule.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote, urlsplit

from meshnet_core.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

DEFAULT_PORT = 6379
SCHEMES = {"redis": False, "rediss": True}  # and whether they speak TLS


@dataclass(frozen=True, slots=True)
class Entry:
    """A text under its key, and for how many more seconds it is kept."""

    key: str
    text: str
    left_s: float


class Registry(Protocol):
    """Keeps texts for several trackers. Every method raises `RegistryUnreachableError` where it does not answer in
    time, or refuses."""

    @property
    def shown(self) -> str:
        """Its address, without secrets."""
        ...

    async def put(self, entries: Sequence[Entry]) -> None:
        """Keep each text for so long, in place of what was under its key, and say so to whoever follows `changes`."""
        ...

    async def fetch(self, keys: Sequence[str]) -> list[Entry]:
        """What is kept under ``keys`` now, with what is left of its time; keys that hold nothing are left out."""
        ...

    async def keys(self) -> list[str]:
        """Every key of this mesh under which something is kept."""
        ...

    def changes(self) -> AbstractAsyncContextManager[AsyncIterator[str]]:
        """Keys as they are put by anybody, from the moment that the block is entered."""
        ...

    async def close(self) -> None:
        """Close the connections; idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class RegistryAddress:
    """Where a Redis is, as ``redis://[user:password@]host[:port][/database]`` says it.

    Attributes:
        tls: whether the scheme is ``rediss``.
    """

    host: str
    port: int = DEFAULT_PORT
    database: int = 0
    username: str | None = None
    password: str | None = None
    tls: bool = False

    @classmethod
    def parse(cls, url: str) -> RegistryAddress:
        """Read a URL.

        Raises:
            InvalidInputError: it is none of a Redis, or holds what is not understood here.
        """
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES:
            raise InvalidInputError(
                f"--registry {_without_secrets(url)!r} is not supported; give a Redis, such as "
                "redis://10.0.0.5:6379/0, or leave it out for a tracker that keeps its directory alone"
            )
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        path = parts.path.removeprefix("/")
        if not host or (path and not path.isdecimal()) or parts.query or parts.fragment:
            raise InvalidInputError(
                f"--registry {_without_secrets(url)!r} cannot be read; write redis://HOST:PORT/DATABASE, "
                "where DATABASE is a number and may be left out, and nothing follows it"
            )
        return cls(
            host=host,
            port=DEFAULT_PORT if port is None else port,
            database=int(path or 0),
            username=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            tls=SCHEMES[parts.scheme],
        )

    def __str__(self) -> str:
        """Without user and password."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}/{self.database}"


def _without_secrets(url: str) -> str:
    scheme, colon, rest = url.partition("://")
    return f"{scheme}{colon}{rest.rpartition('@')[2]}"[:200]
