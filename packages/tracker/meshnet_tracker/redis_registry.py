"""A `Registry` kept in Redis: texts are keys with an expiry, changes are messages on a channel that name a key.

The expiry is Redis's: a tracker tells durations and is told durations, so that no two clocks are ever compared. A text
and its expiry are written by one command and read in one transaction; nothing is read to be written back. What comes
from Redis is text and stays text, nothing is unpickled.

The only place where redis-py's exceptions become ours.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from meshnet_core.errors import RegistryUnreachableError
from meshnet_core.ids import check_id
from meshnet_tracker.registry import Entry, RegistryAddress

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
    from typing import TypeVar

    Answer = TypeVar("Answer")

FORMAT = 1  # of keys and texts; trackers of another one do not see these
TIMEOUT_S = 2.0  # for one exchange: a Redis that needs longer is as good as gone, and trackers go on without it
BATCH = 256  # keys in one exchange
SCAN_COUNT = 1000


class RedisRegistry:
    """One mesh's part of a Redis.

    Args:
        address: where the Redis is.
        mesh: name of the mesh; several may share one Redis and do not see each other.
        timeout_s: seconds for one exchange.
    """

    def __init__(self, address: RegistryAddress, mesh: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._address = address
        self._prefix = f"meshnet:{FORMAT}:{check_id(mesh, 'the name of a mesh')}:"
        self._channel = f"{self._prefix}changes"
        self._timeout_s = timeout_s
        self._redis: Redis | None = None

    @property
    def shown(self) -> str:
        return str(self._address)

    async def put(self, entries: Sequence[Entry]) -> None:
        for batch in _batches(entries):
            pipeline = self._connection().pipeline(transaction=False)
            for entry in batch:
                pipeline.set(f"{self._prefix}{entry.key}", entry.text, px=max(1, round(1000 * entry.left_s)))
                pipeline.publish(self._channel, entry.key)
            await self._in_time(pipeline.execute())

    async def fetch(self, keys: Sequence[str]) -> list[Entry]:
        found = []
        for batch in _batches(keys):
            # One transaction for each batch: a text is never read with the time of one that came after it.
            pipeline = self._connection().pipeline(transaction=True)
            for key in batch:
                pipeline.get(f"{self._prefix}{key}")
                pipeline.pttl(f"{self._prefix}{key}")
            answers = await self._in_time(pipeline.execute())
            for key, text, left_ms in zip(batch, answers[::2], answers[1::2], strict=True):
                if isinstance(text, str) and left_ms > 0:  # without an expiry it is not ours
                    found.append(Entry(key, text, left_ms / 1000))
        return found

    async def keys(self) -> list[str]:
        found: set[str] = set()
        cursor = 0
        while True:
            answer: Any = await self._in_time(
                self._connection().scan(cursor, match=f"{self._prefix}*", count=SCAN_COUNT)
            )
            cursor, names = int(answer[0]), answer[1]
            found.update(name.removeprefix(self._prefix) for name in names)
            if cursor == 0:
                return sorted(found)

    @asynccontextmanager
    async def changes(self) -> AsyncIterator[AsyncIterator[str]]:
        subscription = self._connection().pubsub(ignore_subscribe_messages=True)
        try:
            await self._in_time(subscription.subscribe(self._channel))
            yield self._messages(subscription)
        finally:
            with suppress(RedisError, OSError, TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    await subscription.aclose()  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        redis, self._redis = self._redis, None
        if redis is not None:
            with suppress(RedisError, OSError, TimeoutError):
                await redis.aclose()

    async def _messages(self, subscription: Any) -> AsyncIterator[str]:
        while True:
            try:
                message = await subscription.get_message(timeout=self._timeout_s)
            except (RedisError, OSError, TimeoutError) as error:
                raise self._unreachable(error) from error
            if message is not None and isinstance(message.get("data"), str):
                yield message["data"]

    async def _in_time(self, answer: Awaitable[Answer]) -> Answer:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except (RedisError, OSError, TimeoutError) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> RegistryUnreachableError:
        why = str(error).strip().partition("\n")[0].rstrip(".") or f"no answer within {self._timeout_s:g} s"
        return RegistryUnreachableError(f"the registry at {self.shown} does not answer: {why}")

    def _connection(self) -> Redis:
        """The client, made inside the running loop; it connects when it is first used, and again when it must."""
        if self._redis is None:
            address = self._address
            self._redis = Redis(
                host=address.host,
                port=address.port,
                db=address.database,
                username=address.username,
                password=address.password,
                ssl=address.tls,
                socket_timeout=self._timeout_s,
                socket_connect_timeout=self._timeout_s,
                retry=Retry(NoBackoff(), 0),  # `sharing` must know of every break: what was said meanwhile is lost
                decode_responses=True,
                encoding_errors="replace",  # a stranger's bytes are refused as text that cannot be read
                client_name="meshnet-tracker",
            )
        return self._redis


def _batches(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    iterator = iter(items)
    while batch := tuple(itertools.islice(iterator, BATCH)):
        yield batch
