"""Several trackers of one mesh as one: asks the one that answered last, and the next one at once where it does not.

Learns from every answer where the other trackers are. Knows no lease, no plan and no pause between tries; that is for
whoever asks.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from meshnet_core.demand import Demand
from meshnet_core.errors import InvalidInputError, MeshnetError, TrackerUnreachableError
from meshnet_core.frames import PROTOCOLS
from meshnet_core.link_info import Neighbour
from meshnet_core.membership import NodeInfo, Snapshot
from meshnet_core.placeable import Wish
from meshnet_core.route import Route
from meshnet_core.tracker_client import TrackerClient, TrackerHealth

Answer = TypeVar("Answer")

TIMEOUT_S = 5.0  # for one call to the last of them
PATIENCE_S = 2.0  # for one call while there is another tracker to ask
HEALTH_TIMEOUT_S = 2.0

logger = logging.getLogger(__name__)


class Trackers:
    """The trackers of one mesh; made anywhere, used inside one event loop, closed by :meth:`close`.

    Args:
        urls: addresses that are known beforehand, the preferred one first; they are never forgotten.
        timeout_s: seconds for one call to a tracker when no other is left to ask.
        patience_s: seconds for one call while another one is.
        protocols, tls: as for `TrackerClient`.

    Raises:
        InvalidInputError: if there is none, or one of them is no address.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float = TIMEOUT_S,
        patience_s: float = PATIENCE_S,
        protocols: range = PROTOCOLS,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._patience_s = min(patience_s, timeout_s)
        self._protocols = protocols
        self._tls = tls
        given = [self._client(url) for url in urls]
        if not given:
            raise InvalidInputError("no tracker is named; give an address such as http://127.0.0.1:7400")
        self._clients = {client.url: client for client in given}  # in the order in which they are asked
        self._given = frozenset(self._clients)
        self._current = given[0].url
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The tracker that is asked first: the one that answered last."""
        return self._current

    @property
    def urls(self) -> tuple[str, ...]:
        """Every tracker that is known."""
        return tuple(self._clients)

    async def heartbeat(self, info: NodeInfo) -> float:
        """As `TrackerClient.heartbeat`; where the trackers do not hear of one another, all of them are told.

        Raises:
            TrackerUnreachableError: none of them answers.
            MeshnetError: what the first that answered refused with.
        """
        lease_s = await self._ask(lambda client: client.heartbeat(info))
        await self._tell_others(lambda client: client.heartbeat(info))
        return lease_s

    async def leave(self, node_id: str, *, boot: str | None = None) -> None:
        """As `TrackerClient.leave`, told to all of them where `heartbeat` is."""
        await self._ask(lambda client: client.leave(node_id, boot=boot))
        await self._tell_others(lambda client: client.leave(node_id, boot=boot))

    async def wish(self, node_id: str, *, boot: str) -> Wish:
        """As `TrackerClient.wish`."""
        return await self._ask(lambda client: client.wish(node_id, boot=boot))

    async def snapshot(self) -> Snapshot:
        """As `TrackerClient.snapshot`."""
        return await self._ask(lambda client: client.snapshot())

    async def neighbours(self, node_id: str) -> list[Neighbour]:
        """As `TrackerClient.neighbours`."""
        return await self._ask(lambda client: client.neighbours(node_id))

    async def route(
        self,
        model: str,
        excluded: frozenset[str] = frozenset(),
        *,
        fingerprint: str | None = None,
        demand: Demand | None = None,
    ) -> Route:
        """As `TrackerClient.route`."""
        return await self._ask(lambda client: client.route(model, excluded, fingerprint=fingerprint, demand=demand))

    async def health(self) -> list[TrackerHealth]:
        """How each of them is right now."""

        async def one(client: TrackerClient) -> list[TrackerHealth]:
            try:
                async with asyncio.timeout(HEALTH_TIMEOUT_S):
                    return await client.health()
            except TimeoutError:
                return [TrackerHealth(client.url, answers=False)]

        told = await asyncio.gather(*(one(client) for client in list(self._clients.values())))
        return [health for healths in told for health in healths]

    async def close(self) -> None:
        """Close the connections; idempotent."""
        await asyncio.gather(*(client.close() for client in self._clients.values()), *self._closing)

    async def _ask(self, call: Callable[[TrackerClient], Awaitable[Answer]]) -> Answer:
        refusals: list[TrackerUnreachableError] = []
        asked: set[str] = set()
        while (url := self._next(asked)) is not None:
            asked.add(url)
            client = self._clients[url]
            try:
                answer = await self._in_time(client, call, last=self._next(asked) is None)
            except TrackerUnreachableError as error:
                refusals.append(error)
                continue
            except MeshnetError:
                self._answered(client)  # with a no, but it did
                raise
            self._answered(client)
            self._learn(client)
            return answer
        if len(refusals) == 1:
            raise refusals[0]
        raise TrackerUnreachableError(
            f"none of {len(refusals)} trackers answers: "
            + "; ".join(refusal.message.partition("; ")[0] for refusal in refusals)
        ) from refusals[-1]

    async def _in_time(
        self, client: TrackerClient, call: Callable[[TrackerClient], Awaitable[Answer]], *, last: bool
    ) -> Answer:
        """One that hangs must not hold up what another would answer."""
        if last:
            return await call(client)
        try:
            async with asyncio.timeout(self._patience_s):
                return await call(client)
        except TimeoutError as error:
            raise TrackerUnreachableError(
                f"the tracker at {client.url} gave no answer within {self._patience_s:g} s"
            ) from error

    def _next(self, asked: set[str]) -> str | None:
        """The next one to ask: the current one, then those after it in their order, round about."""
        urls = list(self._clients)
        at = urls.index(self._current)
        return next((url for url in urls[at:] + urls[:at] if url not in asked), None)

    def _answered(self, client: TrackerClient) -> None:
        self._clients.setdefault(client.url, client)  # what another call learned meanwhile may have left it out
        if client.url != self._current:
            logger.warning("the tracker at %s does not answer; asking the one at %s instead", self._current, client.url)
            self._current = client.url

    def _learn(self, client: TrackerClient) -> None:
        """Know the trackers that this one named, and no longer those that were learned and that it does not name."""
        if client.told.registry == "none":
            return
        wanted = self._given | {client.url} | set(client.told.others)
        for url in [url for url in self._clients if url not in wanted]:
            task = asyncio.create_task(self._clients.pop(url).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for url in client.told.others:
            if url not in self._clients:
                with suppress(InvalidInputError):  # one that this machine cannot speak with, such as without TLS
                    self._clients[url] = self._client(url)

    async def _tell_others(self, call: Callable[[TrackerClient], Awaitable[object]]) -> None:
        """Tell all but the one that was told just now, where it says that they do not hear of it."""
        if self._clients[self._current].told.registry == "unreachable":
            others = [client for url, client in self._clients.items() if url != self._current]
            await asyncio.gather(*(self._tell(client, call) for client in others))

    async def _tell(self, client: TrackerClient, call: Callable[[TrackerClient], Awaitable[object]]) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await call(client)
        except (MeshnetError, TimeoutError) as error:
            logger.debug("the tracker at %s was not told: %s", client.url, error)

    def _client(self, url: str) -> TrackerClient:
        return TrackerClient(url, timeout_s=self._timeout_s, protocols=self._protocols, tls=self._tls)
