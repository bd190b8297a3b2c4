"""Two nodes over real tiny shards, and a client that speaks frames to them: what the tests of the hop service drive.

Frames are built by hand, so that each can be wrong in one way; shards and the wire between them can be held up or
broken at a place of the test's choosing.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from in_process_mesh import FINGERPRINT, MODEL, RecordingTransport, random_prompt
from meshnet_core.clock import Clock
from meshnet_core.errors import HopError
from meshnet_core.frames import Frame, FrameReply, Phase
from meshnet_core.layer_range import LayerRange
from meshnet_core.open_document import OpenDocument
from meshnet_core.route import Hop, Route
from meshnet_core.sampling import SamplingParams
from meshnet_node.cache_store import CacheStore, SessionKey, StoreLimits
from meshnet_node.forward_lane import ForwardLane
from meshnet_node.hop_service import HopService
from meshnet_node.hop_session import HopSession
from meshnet_node.sampler import sample
from meshnet_node.shard_pool import LoadedShard, ShardPool
from meshnet_node.shard_work import ShardBackend, ShardResult, ShardWork

SESSION = "s-test"
EPOCH = 3
URLS = ("http://node-0", "http://node-1")
RANGES = (LayerRange(0, 2), LayerRange(2, 4))
PROMPT = random_prompt(12)
STEPS = 6
HIDDEN = 32
LIMITS = StoreLimits(budget_bytes=10_000_000)
PATIENCE_S = 20  # for what should come at once


class Watched:
    """A shard whose forwards are counted and can be held up or broken.

    Attributes:
        forwards: (position, seq_len) of every frame that came.
        before: called on the thread that runs it with each frame before it runs.
        before_layer: called there before each layer.
        layers_run: how many layers were not cancelled.
    """

    def __init__(self, inner: ShardBackend) -> None:
        self.inner = inner
        self.forwards: list[tuple[int, int]] = []
        self.before: Callable[[ShardWork], None] = lambda _work: None
        self.before_layer: Callable[[], None] = lambda: None
        self.layers_run = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, works: Sequence[ShardWork]) -> list[ShardResult | Exception]:
        for work in works:
            self.forwards.append((work.position, work.seq_len))
            self.before(work)
        return self.inner.forward([replace(work, cancelled=self._looking(work)) for work in works])

    def _looking(self, work: ShardWork) -> Callable[[], bool]:
        def look() -> bool:
            self.before_layer()
            stop = work.cancelled()
            self.layers_run += not stop
            return stop

        return look


class Gate:
    """Holds a lane's thread up."""

    def __init__(self) -> None:
        self._reached = threading.Semaphore(0)
        self._open = threading.Semaphore(0)

    def __call__(self, *_: object) -> None:
        self._reached.release()
        assert self._open.acquire(timeout=PATIENCE_S)

    async def reached(self) -> None:
        """Wait until a thread stands here."""
        assert await asyncio.to_thread(self._reached.acquire, timeout=PATIENCE_S)

    def open(self) -> None:
        """Let that thread on, and all that come."""
        self._open.release(10_000)


class Wire(RecordingTransport):
    """Frames between the hops can be held up, lost on the way there or on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[Frame], Any] = lambda _frame: None
        self.after: Callable[[Frame], Any] = lambda _frame: None

    async def forward(self, url: str, frame: Frame) -> FrameReply:
        if asyncio.iscoroutine(waiting := self.before(frame)):
            await waiting
        reply = await super().forward(url, frame)
        self.after(frame)
        return reply


class Line:
    """The two nodes of one route, and the client's side of one session."""

    def __init__(
        self,
        backends: Sequence[ShardBackend],
        clock: Clock,
        limits: StoreLimits = LIMITS,
        lane: Callable[[], ForwardLane] = ForwardLane,
    ) -> None:
        self.wire = Wire()
        self.shards = [Watched(backend) for backend in backends]
        self.hops = [
            HopService(
                boot=f"b-{at}",
                shards=ShardPool([LoadedShard(cast(ShardBackend, shard), MODEL, FINGERPRINT, max_positions=512)]),
                store=CacheStore(limits, clock),
                lane=lane(),
                transport=self.wire,
                sample=sample,
                clock=clock,
            )
            for at, shard in enumerate(self.shards)
        ]
        for url, hop in zip(URLS, self.hops, strict=True):
            self.wire.endpoints[url] = hop

    def session(self, hop: int = 0) -> HopSession:
        """What ``hop`` holds of the session."""
        found = self.hops[hop].store.find(SessionKey(SESSION, hop))
        assert found is not None
        return found[0]

    async def open(self, **changes: Any) -> None:
        """Open on both hops."""
        whole = document(**changes)
        for at, hop in enumerate(self.hops):
            await hop.open(whole.for_hop(at))

    async def send(self, frame: Frame) -> FrameReply:
        return await asyncio.wait_for(self.hops[frame.hop_index].forward(frame), PATIENCE_S)

    async def refusal(self, frame: Frame) -> HopError:
        """The error that ``frame`` is answered with."""
        with pytest.raises(HopError) as caught:
            await self.send(frame)
        return caught.value

    async def prefill(self, tokens: Sequence[int], chunk: int = 256, **changes: Any) -> FrameReply:
        """Send a whole prompt in chunks; the last one's reply."""
        for at in range(0, len(tokens), chunk):
            part = tokens[at : at + chunk]
            reply = await self.send(tokens_frame(part, at, sample=int(at + len(part) == len(tokens)), **changes))
        return reply

    async def begin(self, **changes: Any) -> None:
        """Open, and prefill the prompt's first part; `GOOD` is the frame that comes next."""
        await self.open(**changes)
        await self.send(replace(FIRST, epoch=changes.get("epoch", EPOCH)))

    async def decode(self, reply: FrameReply, count: int = STEPS) -> list[int]:
        """The token of ``reply`` and those of ``count - 1`` steps after it."""
        tokens = [reply.tokens[0].id]
        while len(tokens) < count:
            reply = await self.send(decode_frame(tokens[-1], reply.position))
            tokens.append(reply.tokens[0].id)
        return tokens

    async def close(self) -> None:
        for shard in self.shards:
            shard.before = lambda _work: None
            shard.before_layer = lambda: None
        for hop in self.hops:
            await asyncio.wait_for(hop.close(), PATIENCE_S)


def document(**changes: Any) -> OpenDocument:
    """Terms for the first hop; ``prompt`` changes all that follows from it."""
    prompt = changes.pop("prompt", PROMPT)
    hops = tuple(Hop(f"n{at}", URLS[at], RANGES[at]) for at in range(2))
    fields: dict[str, Any] = {
        "session": SESSION,
        "epoch": EPOCH,
        "hop_index": 0,
        "route": Route(MODEL, FINGERPRINT, 4, hops),
        "wire_dtype": "float32",
        "hidden_size": HIDDEN,
        "cache": True,
        "sampling": SamplingParams(),
        "prompt_length": len(prompt),
        "prefill_length": len(prompt),
        "expected_length": len(prompt) + 100,
        "step_deadline_ms": 20_000,
        "history": tuple(prompt),
    }
    return OpenDocument(**(fields | changes))


def packed(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def tokens_frame(tokens: Sequence[int], position: int, *, sample: int, **changes: Any) -> Frame:
    """A prefill frame into the first hop."""
    fields: dict[str, Any] = {
        "session": SESSION,
        "epoch": EPOCH,
        "hop_index": 0,
        "start_layer": 0,
        "phase": Phase.PREFILL,
        "position": position,
        "seq_len": len(tokens),
        "sample": sample,
        "deadline_ms": 20_000,
        "cache": True,
        "body": packed(tokens),
    }
    return Frame(**(fields | changes))


def decode_frame(token: int, position: int, *, sample: int = 1, **changes: Any) -> Frame:
    return tokens_frame([token], position, sample=sample, phase=Phase.DECODE, **changes)


WHOLE = tokens_frame(PROMPT, 0, sample=1)
FIRST = tokens_frame(PROMPT[:8], 0, sample=0)
GOOD = tokens_frame(PROMPT[8:], 8, sample=1)


async def settle() -> None:
    """Let everything that can run on the loop run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def until(true: Callable[[], bool]) -> None:
    """Wait for what another thread brings about."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110 - a lane's thread sets no event
            await asyncio.sleep(0.005)
