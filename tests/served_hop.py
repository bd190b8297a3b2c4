"""A node's door with an endpoint behind it that answers as it is told: for tests of the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field

import pytest

from golden_frames import PREFILL, SESSION
from meshnet_core.errors import (
    MeshnetError,
)
from meshnet_core.frames import Frame, FrameReply
from meshnet_core.layer_range import LayerRange
from meshnet_core.open_document import OpenDocument, OpenReply, ProbeReply
from meshnet_core.prefix import Mark
from meshnet_core.route import Hop, Route
from meshnet_core.sampling import SamplingParams

BOOT = "b-0123456789abcdef"
MAX_BODY = 64 * 1024
BODY_TIMEOUT_S = 1.5  # a test sits it out; on a machine that stalls, whole bodies must not
OPEN = OpenDocument(
    session=SESSION,
    epoch=0,
    hop_index=0,
    route=Route("toy", "f-1", 30, (Hop("a", "http://a", LayerRange(0, 15)), Hop("b", "http://b", LayerRange(15, 30)))),
    wire_dtype="bfloat16",
    hidden_size=4,
    cache=True,
    sampling=SamplingParams(temperature=0.7, seed=7, logprobs=1),
    prompt_length=261,
    prefill_length=261,
    expected_length=300,
    step_deadline_ms=30000,
)


@dataclass
class FakeEndpoint:
    """Answers as told and remembers what it was asked; knows no rule of sessions."""

    reply: FrameReply = PREFILL.reply
    error: Exception | None = None
    frames: list[Frame] = field(default_factory=list)
    opened: list[OpenDocument] = field(default_factory=list)
    released: list[tuple[str, int | None]] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=lambda: {SESSION: 2})
    gate: asyncio.Event | None = None  # frames wait for it
    opens_at: int | None = None  # the frame that opens the gate for all
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error

    async def open(self, document: OpenDocument) -> OpenReply:
        self._fail()
        self.opened.append(document)
        return OpenReply(BOOT, 4096)

    async def forward(self, frame: Frame) -> FrameReply:
        self.frames.append(frame)
        self.arrived.set()
        self._fail()
        if self.gate is not None:
            if len(self.frames) == self.opens_at:
                self.gate.set()
            await self.gate.wait()
        self.finished.set()
        return self.reply

    async def release(self, session: str, through_epoch: int | None = None, keep: tuple[Mark, ...] = ()) -> int:
        self._fail()
        self.released.append((session, through_epoch))
        return self.held.pop(session, 0)

    async def probe(self, session: str | None) -> ProbeReply:
        self._fail()
        return ProbeReply(BOOT, None if session is None else 261, 3)


@dataclass
class Node:
    endpoint: FakeEndpoint
    port: int
    not_ready: list[str] = field(default_factory=list)  # the newest is why it is not

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


async def refusal(call: Awaitable[object]) -> MeshnetError:
    with pytest.raises(MeshnetError) as caught:
        await call
    return caught.value
