"""One call to a hop, however it travels: how long it may take, when it is made again, and what its refusals say."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from meshnet_core.clock import Clock
from meshnet_core.errors import (
    BadFrameError,
    DeadlineError,
    HopError,
    HopUnreachableError,
    MeshnetError,
    RateLimitedError,
    error_from_wire,
)
from meshnet_core.http_codec import decode_json

T = TypeVar("T")

RATE_RETRIES = 3
SHORTEST_PAUSE_S = 0.01  # before a hop that was asked too much is asked again


@dataclass(slots=True)
class Reuse:
    """Whether the ``connection`` that an attempt was made on had served before."""

    connection: bool = False


Attempt = Callable[[float, Reuse], Awaitable[T]]


@dataclass(frozen=True, slots=True)
class HopCall:
    """What a message about a call needs; ``session`` is the one a probe asks about."""

    method: str
    url: str
    path: str
    timeout_s: float
    hop_index: int | None
    session: str | None = None

    def __str__(self) -> str:
        hop = "" if self.hop_index is None else f"hop {self.hop_index}, "
        return f"{hop}{self.url}{self.path}"

    async def persisted(self, clock: Clock, attempt: Attempt[T]) -> T:
        """The outcome of ``attempt(seconds left, reuse)``, made again where that is right, within the call's time.

        Once more where a connection that had served before turned out to be closed, and a few times when a hop that
        was asked too much says so. Repeating is safe: every call is idempotent, and an identical frame is answered from
        the hop's last reply.

        Raises:
            DeadlineError: the time is up.
            whatever the last attempt raised.
        """
        deadline = clock.now() + self.timeout_s
        try:
            async with asyncio.timeout(self.timeout_s):
                reuse = Reuse()
                try:
                    return await self._unhurried(clock, attempt, deadline, reuse)
                except HopUnreachableError:
                    if not reuse.connection:
                        raise
                    # A hop may close an idle connection at the moment when it is used.
                    return await attempt(deadline - clock.now(), reuse)
        except TimeoutError as error:
            raise DeadlineError(
                f"{self} did not answer within {self.timeout_s:g} s", hop_index=self.hop_index
            ) from error

    async def _unhurried(self, clock: Clock, attempt: Attempt[T], deadline: float, reuse: Reuse) -> T:
        left_s = self.timeout_s
        for _ in range(RATE_RETRIES):
            try:
                return await attempt(left_s, reuse)
            except RateLimitedError as error:
                await asyncio.sleep(max(SHORTEST_PAUSE_S, error.retry_after_s))
                left_s = deadline - clock.now()
        return await attempt(left_s, reuse)

    def check_dialled(self, *, tls: ssl.SSLContext | None) -> None:
        """Refuse a plain address where calls are made with ``tls``.

        Raises:
            HopUnreachableError: the hop is at one.
        """
        if tls is not None and not self.url.startswith("https://"):
            raise HopUnreachableError(
                f"{self} is not dialled: this machine is in a mesh, whose nodes are at https:// addresses",
                hop_index=self.hop_index,
            )

    def refused(self, answer: bytes, boot: str | None) -> MeshnetError:
        """The error in an answer that is known to be a refusal."""
        return self.refusal(answer, boot, f"a refusal from {self}: {answer[:120].decode(errors='replace')}")

    def refusal(self, answer: bytes, boot: str | None, text: str) -> MeshnetError:
        """The error in an answer, told whose it is; ``text`` is quoted where it holds none of ours."""
        try:
            document = decode_json(answer, "an error")
        except BadFrameError:
            document = None
        error = error_from_wire(document, fallback=text)
        # An error that names another hop only passed through this one, whose boot id says nothing about it.
        if isinstance(error, HopError) and error.hop_index in (None, self.hop_index):
            error.hop_index = self.hop_index
            error.boot = error.boot or boot
        return error
