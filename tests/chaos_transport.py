"""An in-process transport on which much goes wrong, by a seed: calls are lost before or after they were carried out,
delayed, doubled, overtaken, and cut short.

What was cut is read by the production codec and checks, so that the answer to it is the one that the wire would give.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from in_process_mesh import RecordingTransport
from meshnet_core import http_codec
from meshnet_core.errors import HopUnreachableError, MeshnetError
from meshnet_core.frames import Frame, FrameReply
from meshnet_core.open_document import OpenDocument, OpenReply
from meshnet_core.prefix import Mark
from meshnet_core.transport import InProcessTransport

Reply = TypeVar("Reply")
LOST_IN_A_ROW = 2  # of one release: who gives up after three tries leaves the rest to the time to live


@dataclass(frozen=True)
class Chaos:
    """How likely each fault is, for each call."""

    lost: float = 0.03
    reply_lost: float = 0.03
    delayed: float = 0.25
    doubled: float = 0.05
    doubled_late: float = 0.03
    cut: float = 0.02
    reply_cut: float = 0.003  # each costs a prefill, since who cannot read an answer cannot know what was done
    most_turns: int = 40  # of the event loop, that a delay takes


class ChaosTransport(RecordingTransport):
    """Does to calls what ``chaos`` says. `faults` counts what was done; `settle` waits for late twins."""

    def __init__(self, seed: int, chaos: Chaos | None = None) -> None:
        super().__init__()
        self.faults: Counter[str] = Counter()
        self._chaos = chaos or Chaos()
        self._random = random.Random(seed)
        self._late: set[asyncio.Task[None]] = set()
        self._lost_releases: Counter[tuple[str, str]] = Counter()

    async def open(self, url: str, document: OpenDocument) -> OpenReply:
        return await self._disturbed(lambda: InProcessTransport.open(self, url, document), document.hop_index)

    async def forward(self, url: str, frame: Frame) -> FrameReply:
        if len(frame.body) and self._happens("cut", self._chaos.cut):
            # The hop refuses it and must go on as if it had not come.
            return await super(RecordingTransport, self).forward(
                url, replace(frame, body=bytes(frame.body)[: self._random.randrange(len(frame.body))])
            )
        reply = await self._disturbed(lambda: InProcessTransport.forward(self, url, frame), frame.hop_index)
        if self._happens("reply_cut", self._chaos.reply_cut):
            document = http_codec.encode_json(reply.to_wire())
            return http_codec.decode_reply(document[: self._random.randrange(len(document))], FrameReply.from_wire)
        return reply

    async def release(
        self, url: str, session: str, through_epoch: int | None = None, keep: tuple[Mark, ...] = ()
    ) -> int:
        if self._lost_releases[url, session] < LOST_IN_A_ROW and self._happens("lost", self._chaos.lost):
            self._lost_releases[url, session] += 1
            raise HopUnreachableError(f"a release was lost on its way to {url}")
        await self._delay()
        return await super().release(url, session, through_epoch, keep)

    async def settle(self) -> None:
        """Wait until nothing is on its way any more."""
        while self._late:
            await asyncio.gather(*self._late, return_exceptions=True)

    async def _disturbed(self, call: Callable[[], Awaitable[Reply]], hop_index: int) -> Reply:
        if self._happens("lost", self._chaos.lost):
            raise HopUnreachableError("lost on its way", hop_index=hop_index)
        await self._delay()
        if self._happens("doubled_late", self._chaos.doubled_late):
            task = asyncio.create_task(self._again(call))
            self._late.add(task)
            task.add_done_callback(self._late.discard)
        if self._happens("doubled", self._chaos.doubled):
            first, second = await asyncio.gather(call(), call(), return_exceptions=True)
            if isinstance(second, BaseException) and not isinstance(second, MeshnetError):
                raise second
            if isinstance(first, BaseException):
                raise first
            reply = first
        else:
            reply = await call()
        if self._happens("reply_lost", self._chaos.reply_lost):
            raise HopUnreachableError("the reply was lost on its way", hop_index=hop_index)
        await self._delay()
        return reply

    async def _again(self, call: Callable[[], Awaitable[object]]) -> None:
        for _ in range(5 * self._chaos.most_turns):
            await asyncio.sleep(0)
        try:
            await call()
        except MeshnetError:
            self.faults["late twins refused"] += 1

    async def _delay(self) -> None:
        if self._happens("delayed", self._chaos.delayed):
            for _ in range(self._random.randrange(1, self._chaos.most_turns)):
                await asyncio.sleep(0)

    def _happens(self, fault: str, likelihood: float) -> bool:
        happens = self._random.random() < likelihood
        self.faults[fault] += happens
        return happens
