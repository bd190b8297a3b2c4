"""Keeps a node's place at a tracker: announces it, again at a third of each lease, and says goodbye.

Every heartbeat is the whole announcement, so a tracker that restarted knows the node again after the next one. Knows
neither HTTP nor what a node holds: it is given a client and a function that describes the node.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from meshnet_core.errors import MeshnetError, TrackerUnreachableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meshnet_core.membership import NodeInfo

FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 10.0
SHORTEST_BEAT_S = 0.2
GOODBYE_S = 2.0  # a node that stops does not wait longer for a tracker that hangs

logger = logging.getLogger(__name__)


class Registrar(Protocol):
    """What of a tracker's client is needed here."""

    @property
    def url(self) -> str: ...

    async def heartbeat(self, info: NodeInfo) -> float: ...

    async def leave(self, node_id: str, *, boot: str | None = None) -> None: ...


class RegistrationState(enum.StrEnum):
    """How the last try to announce the node went."""

    NEW = "new"
    REGISTERED = "registered"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    FAILED = "failed"  # a fault of ours, such as a node that could not be described


class Registration:
    """Announces one node until it is stopped.

    Args:
        client: reaches the tracker, or of several the one that answers.
        describe: the node as it is now; called for each heartbeat.
        sleep: waits so many seconds.
        draw: a number in [0, 1), for the jitter: many nodes that lose one tracker must not come back in step.
    """

    def __init__(
        self,
        client: Registrar,
        describe: Callable[[], NodeInfo],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._describe = describe
        self._sleep = sleep
        self._draw = draw
        self._task: asyncio.Task[None] | None = None
        self._announced: NodeInfo | None = None
        self._failures = 0
        self._beats = 0
        self._said: tuple[RegistrationState, str] | None = None
        self.state = RegistrationState.NEW

    def start(self) -> None:
        """Begin to announce the node, in a task of the running loop."""
        if self._task is None:
            self._task = asyncio.create_task(self.run(), name="registration")

    async def stop(self) -> None:
        """Stop announcing the node and take it out of the directory; idempotent, and never fails.

        With no tracker to tell, the lease runs out by itself.
        """
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait([task])
        if (node := self._announced) is not None:
            with contextlib.suppress(MeshnetError, TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    await self._client.leave(node.node_id, boot=node.boot)

    async def run(self) -> None:
        """Announce the node again and again; ends only by being cancelled."""
        while True:
            await self._sleep(await self.beat())

    async def beat(self) -> float:
        """Announce the node once, and log if that went otherwise than the last time.

        Returns:
            Seconds until the next try: up to a tenth below a third of the lease, or after n failures in a row
            between half of and the whole of ``FIRST_RETRY_S * 2**(n - 1)``, which `LONGEST_RETRY_S` bounds.
        """
        try:
            self._beats += 1
            self._announced = info = replace(self._describe(), beat=self._beats)
            lease_s = await self._client.heartbeat(info)
        except TrackerUnreachableError as error:
            self._say(RegistrationState.UNREACHABLE, error.code, logging.WARNING, f"not registered: {error.message}")
        except MeshnetError as error:
            self._say(RegistrationState.REFUSED, error.message, logging.ERROR, f"not registered: {error.message}")
        except Exception as error:
            self.state, said = RegistrationState.FAILED, (RegistrationState.FAILED, repr(error))
            if self._said != said:
                self._said = said
                logger.exception("this node could not be announced; it keeps trying")
        else:
            beat_s = max(SHORTEST_BEAT_S, lease_s / 3)
            text = f"registered as {info.node_id} with the tracker at {self._client.url}, heartbeat every {beat_s:g} s"
            self._say(RegistrationState.REGISTERED, self._client.url, logging.INFO, text)
            self._failures = 0
            return beat_s * (1 - 0.1 * self._draw())
        longest = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(self._failures, 16))
        self._failures += 1
        return longest * (0.5 + 0.5 * self._draw())

    def _say(self, state: RegistrationState, why: str, level: int, text: str) -> None:
        """One line for each change, not for each try."""
        self.state = state
        if self._said != (state, why):
            self._said = (state, why)
            logger.log(level, text)
