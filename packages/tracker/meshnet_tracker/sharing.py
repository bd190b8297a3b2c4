"""Shares a directory with the other trackers of a mesh through a registry, and goes on alone while that is gone.

    node ── announcement ──> Directory ── relay ──> what is to be published ──> Registry
    Registry ── key that changed ──> what is to be read ──> Directory.hear

Each tracker writes under keys of its own: what nodes told it, and itself. So nothing is read to be written back, and
two that write at once cannot lose anything. A key that is said to have changed is read with what is left of its time,
which is right however late it is read.

When the registry comes back (or is there for the first time): follow its changes, publish all that is known here, read
all that is there. From then on the changes alone. Knows no Redis and no HTTP; time, sleep and draws are given.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshnet_core.errors import DirectoryFullError, InvalidInputError, RegistryUnreachableError
from meshnet_core.ids import check_id
from meshnet_core.wire_fields import text
from meshnet_tracker.registry import Entry
from meshnet_tracker.sightings import Goodbye, Told, told_from_wire, told_to_wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

    from meshnet_core.clock import Clock
    from meshnet_tracker.directory import Directory
    from meshnet_tracker.registry import Registry

FIRST_RETRY_S, LONGEST_RETRY_S = 0.25, 5.0
# Of a tracker's own entry in a lease: by these a registry that hangs is noticed while nobody says anything.
RENEWALS = 5
READ_AT_ONCE = 1024  # keys that are waited together before they are read
MAX_TRACKERS = 16  # others whose addresses are told on

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrackerInfo:
    """One start of a tracker.

    Attributes:
        tracker_id: new for each start.
        url: where nodes and gateways dial it.
        version: meshnet version.
    """

    tracker_id: str
    url: str
    version: str

    def to_wire(self) -> dict[str, Any]:
        return {"tracker_id": self.tracker_id, "url": self.url, "version": self.version}

    @classmethod
    def from_wire(cls, document: object) -> TrackerInfo:
        """Read :meth:`to_wire`'s form.

        Raises:
            InvalidInputError: on a missing or ill-typed field.
        """
        if not isinstance(document, dict):
            raise InvalidInputError(f"a tracker is a JSON object, not {type(document).__name__}")
        return cls(
            tracker_id=check_id(document.get("tracker_id"), "tracker id"),
            url=text(document, "url", longest=2048),
            version=text(document, "version"),
        )


class Sharing:
    """One tracker's part in a shared directory.

    Args:
        directory: what is shared.
        registry: through which.
        me: this tracker.
        clock: tells which other trackers are still there.
        sleep: waits so many seconds.
        draw: a number in [0, 1), so that many trackers do not come back in step.
    """

    def __init__(
        self,
        directory: Directory,
        registry: Registry,
        me: TrackerInfo,
        clock: Clock,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._directory = directory
        self._registry = registry
        self._clock = clock
        self._sleep = sleep
        self._draw = draw
        self._to_publish: dict[str, tuple[Told, float]] = {}  # with when its time is over
        self._something_to_publish = asyncio.Event()
        self._to_read: dict[str, None] = {}
        self._something_to_read = asyncio.Event()
        self._others: dict[str, tuple[TrackerInfo, float]] = {}  # with when their time is over
        self._changed_at = clock.now()
        self.me = me
        self._connected = False
        self.reachable = False
        self.failures = 0
        directory.relay_to(self._told)

    # -- what is known of it --------------------------------------------------------------------------------------

    @property
    def registry_url(self) -> str:
        return self._registry.shown

    def others(self) -> list[TrackerInfo]:
        """The other trackers that said lately that they are there; the last ones known while the registry is gone."""
        now = self._clock.now()
        if self.reachable:
            self._others = {key: (info, until) for key, (info, until) in self._others.items() if until > now}
        return sorted((info for info, _ in self._others.values()), key=lambda info: info.url)[:MAX_TRACKERS]

    def status(self) -> dict[str, Any]:
        """JSON-ready: where the registry is, whether it answers, and since how many seconds that is so."""
        since_s = round(self._clock.now() - self._changed_at, 3)
        return {"url": self.registry_url, "reachable": self.reachable, "since_s": since_s}

    # -- the loops ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Share until cancelled; never fails."""
        tries = 0
        while True:
            try:
                async with self._registry.changes() as changes:
                    await self._all_anew()
                    tries = 0
                    self._say_reachable()
                    await self._until_it_fails(changes)
            except RegistryUnreachableError as error:
                self._say_unreachable(error.message)
            except Exception:
                logger.exception("the directory is not shared; it is tried again")
                self._say_unreachable("this tracker failed; its log says why")
            longest = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(tries, 16))
            tries += 1
            await self._sleep(longest * (0.5 + 0.5 * self._draw()))

    async def leave(self) -> None:
        """Tell the others that this tracker goes, if the registry answers; what nodes told it is theirs now."""
        try:
            await self._publish_me(gone=True)
        except RegistryUnreachableError as error:
            logger.info("the other trackers were not told of this one's end: %s", error.message)

    async def close(self) -> None:
        """Close the connections; idempotent."""
        await self._registry.close()

    async def _until_it_fails(self, changes: AsyncIterator[str]) -> None:
        loops = [self._following(changes), self._reading(), self._publishing(), self._renewing()]
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _following(self, changes: AsyncIterator[str]) -> None:
        mine = f"/{self.me.tracker_id}/"
        async for key in changes:
            if mine not in key:
                self._to_read[key] = None
                self._something_to_read.set()
        raise RegistryUnreachableError(f"the registry at {self.registry_url} tells of no more changes")

    async def _reading(self) -> None:
        while True:
            await self._something_to_read.wait()
            self._something_to_read.clear()
            while self._to_read:
                await self._read_waiting()

    async def _read_waiting(self) -> None:
        keys = list(self._to_read)[:READ_AT_ONCE]
        entries = await self._registry.fetch(keys)
        for key in keys:
            self._to_read.pop(key, None)
        self._enter(entries)

    async def _publishing(self) -> None:
        while True:
            await self._something_to_publish.wait()
            self._something_to_publish.clear()
            await self._publish_waiting()

    async def _publish_waiting(self) -> None:
        waiting, self._to_publish = self._to_publish, {}
        try:
            await self._put([(told, until - self._clock.now()) for told, until in waiting.values()])
        except BaseException:
            self._to_publish = waiting | self._to_publish  # what came meanwhile is newer
            raise

    async def _renewing(self) -> None:
        while True:
            await self._sleep(self._directory.lease_s / RENEWALS)
            await self._publish_me()

    async def _publish_me(self, *, gone: bool = False) -> None:
        document = json.dumps({"tracker": self.me.to_wire(), "gone": gone})
        await self._registry.put([Entry(f"tracker/{self.me.tracker_id}/", document, self._directory.lease_s)])

    async def _all_anew(self) -> None:
        """Publish all that is known here, then read all that is there."""
        self._connected, self._to_publish = True, {}  # what came before is all in what follows
        await self._put([(one, one.left_s) for one in self._directory.heard()])
        await self._put(self._directory.goodbyes())
        await self._publish_me()
        mine = f"/{self.me.tracker_id}/"
        keys = [key for key in await self._registry.keys() if mine not in key]
        self._enter(await self._registry.fetch(keys))

    # -- entries --------------------------------------------------------------------------------------------------

    def _told(self, told: Told) -> None:
        """What a node told this tracker; while nothing can be published it waits in the directory for `_all_anew`."""
        if self._connected:
            left_s = self._directory.goodbye_s if isinstance(told, Goodbye) else told.left_s
            self._to_publish[self._key(told)] = (told, self._clock.now() + left_s)
            self._something_to_publish.set()

    def _key(self, told: Told) -> str:
        if isinstance(told, Goodbye):
            return f"goodbye/{self.me.tracker_id}/{told.node_id}/{told.boot}"
        return f"node/{self.me.tracker_id}/{told.node.node_id}"

    async def _put(self, told: Sequence[tuple[Told, float]]) -> None:
        """Publish each with what is left of its time, in seconds."""
        await self._registry.put(
            [Entry(self._key(one), json.dumps(told_to_wire(one)), left_s) for one, left_s in told if left_s > 0]
        )

    def _enter(self, entries: Iterable[Entry]) -> None:
        """Goodbyes first: what they are about is then not even entered."""
        for entry in sorted(entries, key=lambda entry: entry.key.partition("/")[0] != "goodbye"):
            try:
                self._enter_one(entry)
            except InvalidInputError as error:
                logger.warning("%s of the registry cannot be read: %s", entry.key[:200], error.message)
            except DirectoryFullError as error:
                logger.warning("%s of the registry is left out: %s", entry.key[:200], error.message)

    def _enter_one(self, entry: Entry) -> None:
        try:
            document = json.loads(entry.text)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"it is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise InvalidInputError(f"it is a JSON object, not {type(document).__name__}")
        if "tracker" in document:
            info = TrackerInfo.from_wire(document["tracker"])
            if document.get("gone") is True:
                self._others.pop(info.tracker_id, None)
            elif info.tracker_id != self.me.tracker_id:
                self._others[info.tracker_id] = (info, self._clock.now() + entry.left_s)
            return
        told = told_from_wire(document, min(entry.left_s, self._directory.lease_s))
        if isinstance(told, Goodbye):
            self._directory.hear_goodbye(told, min(entry.left_s, self._directory.goodbye_s))
        else:
            self._directory.hear(told)

    def _say_reachable(self) -> None:
        self._directory.release()
        if not self.reachable:
            self.reachable, self._changed_at = True, self._clock.now()
            others = ", ".join(info.url for info in self.others()) or "no other tracker"
            logger.info("the directory is shared through %s, with %s", self.registry_url, others)

    def _say_unreachable(self, why: str) -> None:
        self._directory.hold()
        self._connected, self._to_publish, self._to_read = False, {}, {}
        self.failures += 1
        if self.reachable or self.failures == 1:
            logger.warning("%s; this tracker goes on from what it knows and hears itself", why)
            if self.reachable:
                self.reachable, self._changed_at = False, self._clock.now()
