"""One hop's side of one session: what it was told at open, its state, and which frames it has seen.

It says which frame is next and remembers runs; it moves nothing itself. Whether a frame agrees with what was told is
`frame_terms`', the order of frames and what follows a failure `hop_service`'s.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from meshnet_core.dtypes import TOKEN_ID_BYTES, dtype_bytes
from meshnet_core.errors import HopFailedError
from meshnet_core.frames import MAX_CHUNK, Frame, FrameReply, HopTiming, Phase
from meshnet_core.open_document import FallBack, OpenDocument
from meshnet_core.sampling import SampledToken
from meshnet_node.constraint import Constraint
from meshnet_node.session_state import SessionState
from meshnet_node.shard_pool import LoadedShard, ShardLease

KEPT_RUNS = 4  # frames that a retry may still ask for: as many as may be in flight at once
MEASURE_EVERY = 32  # positions


@dataclass(frozen=True, slots=True)
class FrameKey:
    """What makes two frames of one epoch the same: a retry of one is answered without running it twice."""

    position: int
    seq_len: int
    phase: Phase
    sample: int
    body_hash: bytes
    draft: tuple[int, ...] = ()

    @classmethod
    def of(cls, frame: Frame) -> FrameKey:
        digest = hashlib.blake2b(frame.body, digest_size=16).digest()
        return cls(frame.position, frame.seq_len, frame.phase, frame.sample, digest, frame.draft)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What this hop made of a frame: hidden states to pass on, or tokens at the tail."""

    hidden: bytes | memoryview | None
    tokens: tuple[SampledToken, ...]
    timing: HopTiming


@dataclass(slots=True)
class Run:
    """One frame this hop has taken in: its reply to come, and what the next hop has not answered to yet.

    Attributes:
        frame: without its body.
        body_bytes: of that body.
        task: the reply to come; cancelling it ends the run.
        undelivered: what is, or was in vain, on its way to the next hop.
        deadline: the latest of those that the frame and retries of it came with.
    """

    frame: Frame
    body_bytes: int
    task: asyncio.Future[FrameReply]
    undelivered: Outcome | None = None
    deadline: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for it: the frame until it is done with, and what the next hop has not answered to."""
        hidden = None if self.undelivered is None else self.undelivered.hidden
        return (0 if self.task.done() else self.body_bytes) + len(hidden or b"")


def _nothing() -> None:
    pass


@dataclass(slots=True, eq=False)  # one object is one session; comparing states would be slow and mean nothing
class HopSession:
    """State and terms of one session at one hop.

    Attributes:
        document: the terms.
        lease: on the shard it runs on; it ends when the session leaves the store.
        state: None on the stateless path.
        accepted: positions taken in so far, queued ones included; the next frame's position.
        history: at the tail, prompt and answer token ids; grows with each token sampled.
        constraint: at the tail of an answer that is held to a grammar.
        runs: frames in flight, and the last few finished (`KEPT_RUNS`).
        entering: held by the frame that is about to enter the lane, in order.
        frames: how many frames of each kind were run, for people to read.
        offered: positions at which it could begin from prefixes held here, as its gateway was told.
        inherited: where what it began from serves, as far as it was taken: its own state serves there too.
        verifying: the newest verify frame, until its reply says which drafts were right; nothing else is taken in then.
        returns_to: where such a frame began, if drafts were wrong and the next frame may begin there again.
        on_end: called when the session leaves the store.
        reserved: positions for which room was set aside at open: frames up to there need not ask for more.
    """

    document: OpenDocument
    lease: ShardLease
    state: SessionState | None
    accepted: int = 0
    history: list[int] = field(default_factory=list)
    constraint: Constraint | None = None
    runs: dict[FrameKey, Run] = field(default_factory=dict)
    entering: asyncio.Lock = field(default_factory=asyncio.Lock)
    frames: dict[str, int] = field(default_factory=dict)
    received_bytes: int = 0
    state_bytes: int = 0
    offered: frozenset[int] = frozenset()
    inherited: dict[str, int] = field(default_factory=dict)
    verifying: Run | None = None
    returns_to: int | None = None
    on_end: Callable[[], None] = _nothing
    reserved: int = 0
    _changed: asyncio.Event | None = None  # made for who waits: few do, and every frame changes something
    _measured: int = 0
    _measured_at: int = 0
    _cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def shard(self) -> LoadedShard:
        """The shard it runs on."""
        return self.lease.shard

    @property
    def nbytes(self) -> int:
        """Bytes of state after the last frame, of frames that are not done with, and of what the next hop has not
        answered to yet."""
        return self.state_bytes + sum(run.nbytes for run in self.runs.values())

    def room(self, positions: int) -> int:
        """Bytes that the session may come to hold with ``positions`` positions: state, and activations of frames.

        Of as many chunks as may be in flight at once what comes in and what goes out; on the stateless path, which has
        no state, of the whole sequence.
        """
        width = self.width_in + (0 if self.is_tail else self._hidden_width)
        if self.state is None:
            return positions * width
        state = self.shard.backend.state_bytes(self.document.hop.layers.start, positions)
        return state + min(positions, KEPT_RUNS * MAX_CHUNK) * width

    def snapshot_room(self, positions: int) -> int:
        """Bytes that it may hold beside `room` to fall back to a verify frame's beginning, at ``positions``.

        What does not grow without end is what cannot be cut back.
        """
        if self.falls_back is not FallBack.BEGIN:
            return 0
        backend, start = self.shard.backend, self.document.hop.layers.start
        return backend.state_bytes(start, positions) - positions * backend.state_bytes_per_position(start)

    @property
    def width_in(self) -> int:
        """Bytes of one position of a frame's body: a token id into the first hop, hidden states after it."""
        return self._hidden_width if self.document.hop_index > 0 else TOKEN_ID_BYTES

    @property
    def _hidden_width(self) -> int:
        return self.document.hidden_size * dtype_bytes(self.document.wire_dtype)

    @property
    def in_flight(self) -> int:
        return sum(not run.task.done() for run in self.runs.values())

    @property
    def is_tail(self) -> bool:
        return self.document.next_hop is None

    def is_next(self, frame: Frame) -> bool:
        """Whether ``frame`` goes on where those taken in end, or begins on a prefix held here where none was.

        After drafts that were wrong it goes on behind those that were right; or where their frame began, with what was
        right of it and the one token after that: any other frame that begins there is an older one that comes late.
        """
        if self.verifying is not None:
            return False
        if self.returns_to is not None and frame.position == self.returns_to:
            return frame.phase is Phase.VERIFY and frame.known == self.accepted + 1
        begins = frame.phase is Phase.RESUME and self.accepted == 0
        goes_on = self.returns_to is None or self.falls_back is FallBack.ANYWHERE
        return begins or (goes_on and frame.position == self.accepted)

    @property
    def falls_back(self) -> FallBack | None:
        """How its state falls back after a verify frame; None where it takes none."""
        return None if self.state is None else self.state.way_back(self.document.expected_length)

    def take(self, frame: Frame, run: Run) -> None:
        """Take in the next frame. Of drafts it is not known yet whether they are right."""
        self.accepted, self.returns_to = frame.known, None
        self.verifying = run if frame.phase is Phase.VERIFY else None
        self.received_bytes += len(frame.body)
        kind = frame.phase.value if frame.cache else "stateless"
        self.frames[kind] = self.frames.get(kind, 0) + 1

    def settle(self, run: Run, reply: FrameReply) -> None:
        """Learn from the reply to a verify frame how many of its drafts were right.

        Raises:
            HopFailedError: it says so of no number that there can be.
        """
        if self.verifying is not run:
            return
        frame = run.frame
        if not 1 <= len(reply.tokens) <= frame.sample:
            raise HopFailedError(f"{len(reply.tokens)} tokens came after a frame that samples {frame.sample}")
        right = len(reply.tokens) - 1
        self.accepted = frame.known + right
        self.returns_to = None if right == len(frame.draft) else frame.position
        self.verifying = None
        self.announce()

    @property
    def cancelled(self) -> bool:
        """Looked at between layers, from the lane's thread."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Stop the work under way: the session has left the store."""
        self._cancelled.set()
        for run in self.runs.values():
            run.task.cancel()
        self.lease.end()
        self.on_end()
        self.announce()

    def undelivered_before(self, run: Run) -> list[Run]:
        """Runs of earlier frames that ended before the next hop had them, in order."""
        return [
            other
            for other in self.runs.values()
            if other.undelivered is not None and other.task.done() and other.frame.position < run.frame.position
        ]

    @property
    def changed(self) -> asyncio.Event:
        """Set, and another one from then on, when `accepted` or the number of frames in flight changes."""
        if self._changed is None:
            self._changed = asyncio.Event()
        return self._changed

    def announce(self) -> None:
        """Wake whoever waits for this session to change."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def remember(self, key: FrameKey, run: Run) -> None:
        """Keep ``run`` for a retry of its frame; of finished ones only the last few stay, undelivered ones longest."""
        finished = [old for old, past in self.runs.items() if past.task.done()]
        finished.sort(key=lambda old: self.runs[old].undelivered is not None)
        for old in finished[: max(0, len(self.runs) + 1 - KEPT_RUNS)]:
            del self.runs[old]
        self.runs[key] = run

    def measure_state(self) -> None:
        """Bring `state_bytes` up to date; called where the state was just advanced, on the lane's thread.

        Walking every tensor costs more than a decode step should pay, so single positions are counted by the shard's
        growth per position and measured every so often.
        """
        if self.state is None:
            return
        snapshot = self.state.snapshot_bytes
        grown = self.state.position - self._measured_at
        if grown >= MEASURE_EVERY or self._measured_at == 0:
            self._measured_at, self._measured = self.state.position, self.state.nbytes
            grown = 0
        per_position = self.shard.backend.state_bytes_per_position(self.document.hop.layers.start)
        self.state_bytes = self._measured + max(0, grown) * per_position + snapshot

    def summary(self) -> dict[str, Any]:
        """JSON-ready, for people to read."""
        return {
            "session": self.document.session,
            "epoch": self.document.epoch,
            "layers": str(self.document.hop.layers),
            "cache": self.document.cache,
            "positions": self.accepted,
            "frames": dict(self.frames),
            "received_bytes": self.received_bytes,
            "state_bytes": self.state_bytes,
        }
