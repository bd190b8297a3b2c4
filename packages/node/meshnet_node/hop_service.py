"""What a node does with a session: the `HopEndpoint` behind every transport.

Frames of a session run in order of position; an early one waits briefly, an identical one is answered from its last
run, anything else out of place is refused. A frame that fails after it began takes its session's state with it.
Knows no HTTP and no tensors; frames run on the forward lane, state lives in the store.

    forward(frame) ── check ── in order? ── lane (own layers) ──┬─ tail: sample ───────────── reply
                        │         │                             └─ else: next hop's forward ─ reply + own timing
                      refuse   hold / miss        a chunk that is not the last is acknowledged once queued downstream
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from meshnet_core.clock import Clock
from meshnet_core.errors import (
    BadFrameError,
    CacheFullError,
    CacheMissError,
    DeadlineError,
    DrainingError,
    HopError,
    HopFailedError,
    HopUnreachableError,
    MeshnetError,
    MissReason,
    UnsupportedModelError,
)
from meshnet_core.frames import MAX_CHUNK, Frame, FrameReply, HopTiming, Phase
from meshnet_core.membership import ShardInfo
from meshnet_core.open_document import OpenDocument, OpenReply, ProbeReply
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_core.transport import HopTransport
from meshnet_node.cache_store import CacheStore, SessionKey
from meshnet_node.forward_lane import ForwardLane
from meshnet_node.hop_session import FrameKey, HopSession, Outcome, Run
from meshnet_node.model_backend import ForwardCancelledError, ShardResult, ShardWork
from meshnet_node.shard_pool import ShardLease, ShardPool

logger = logging.getLogger(__name__)

GROWTH_QUANTUM = MAX_CHUNK  # positions set aside beyond the prefill, so that a session seldom has to ask for room
MAX_QUEUED_FRAMES = 4  # of one session at one hop; the sender waits beyond that
EARLY_HOLD_S = 10.0  # how long a frame waits for the one before it
RUN_DEADLINES = 2  # a frame may run for this many of its steps' deadlines: one that was busy is asked for once more
DOWNSTREAM_MARGIN = 0.95  # of what is left of the deadline goes to the next hop, so that the hop that hung is blamed

SampleFunction = Callable[[torch.Tensor, SamplingParams, Sequence[int], int, int], SampledToken]


class HopService:
    """Serves sessions on this node's shards.

    Args:
        boot: boot id of this process.
        shards: what is offered, and loaded where sessions ask for it.
        store: where sessions are kept, shared by all shards.
        lane: runs the frames.
        transport: reaches the next hops.
        sample: chooses tokens at the tail.
        clock: for deadlines.
    """

    def __init__(
        self,
        *,
        boot: str,
        shards: ShardPool,
        store: CacheStore[HopSession],
        lane: ForwardLane,
        transport: HopTransport,
        sample: SampleFunction,
        clock: Clock,
    ) -> None:
        self.boot = boot
        self.shards = shards
        self.store = store
        self.draining = False
        self.drains = 0
        self.misses: Counter[MissReason] = Counter()  # frames and opens refused for want of state
        self.recent: deque[dict[str, Any]] = deque(maxlen=32)  # what is remembered of ended sessions, for people
        self._lane = lane
        self._transport = transport
        self._sample = sample
        self._clock = clock
        self._background: set[asyncio.Task[Any]] = set()

    async def open(self, document: OpenDocument) -> OpenReply:
        """Take a session in, with room for its prefill and a growth quantum, or refuse it unchanged."""
        with self._marked(document.hop_index):
            key = SessionKey(document.session, document.hop_index)
            self.store.sweep()
            known = self.store.find(key)
            if known is not None and known[1] == document.epoch:
                if known[0].document != document:
                    raise BadFrameError("this session and epoch are open on other terms; a retry repeats its terms")
                return OpenReply(self.boot, self._reserve(known[0]))
            if self.draining and known is None:  # one that is here goes on, in a newer epoch too
                raise DrainingError("this node is draining and takes no new sessions")
            lease = await self._lease_shard(document, in_use=known is not None)
            try:
                return self._admit(key, document, lease)
            except BaseException:
                lease.end()
                raise

    async def forward(self, frame: Frame) -> FrameReply:
        """Run a frame here and on the hops after this one."""
        arrived = self._clock.now()
        key = SessionKey(frame.session, frame.hop_index)
        with self._marked(frame.hop_index):
            session = self.store.require(key, frame.epoch)
            try:
                session.check(frame)
                run = await self._take_in(key, session, frame, arrived)
                if not frame.sample and session.is_tail:
                    return FrameReply(frame.position + frame.seq_len, draining=self._if_draining(frame))
                return await self._outcome_of(run, key, frame, arrived)
            except HopError as error:
                if error.hop_index is None:
                    error.position = session.accepted
                raise

    async def release(self, session: str, through_epoch: int | None = None) -> int:
        """Free the session on every hop it has here; what runs of it stops between layers."""
        for held in self.store:
            of_it = held.document.session == session
            if of_it and (through_epoch is None or held.document.epoch <= through_epoch):
                self.recent.append(held.summary())
        return self.store.release(session, through_epoch)

    async def probe(self, session: str | None) -> ProbeReply:
        """Alive, how busy, and how far the session is."""
        positions = [held.accepted for held in self.store if held.document.session == session]
        return ProbeReply(self.boot, max(positions, default=None), self._lane.queued)

    def drain(self) -> None:
        """From now on take no new sessions, and tell those that are here to move. Idempotent."""
        self.drains += not self.draining
        self.draining = True

    def status(self) -> dict[str, Any]:
        """JSON-ready: shards, running and recent sessions, bytes."""
        return {
            "boot": self.boot,
            "draining": self.draining,
            "queued": self._lane.queued,
            "sessions": len(self.store),
            "state_bytes": sum(held.nbytes for held in self.store),
            "reserved_bytes": self.store.nbytes,
            "budget_bytes": self.store.limits.budget_bytes,
            "max_sessions": self.store.limits.max_sessions,
            "session_ttl_s": self.store.limits.ttl_s,
            "dropped": self._dropped(),
            "misses": {reason.value: count for reason, count in sorted(self.misses.items())},
            "drains": self.drains,
            "loaded_shards": self.shards.loaded,
            "max_loaded_shards": self.shards.max_loaded,
            "shard_loads": self.shards.loads,
            "shard_drops": self.shards.drops,
            "shards": [shard.info().to_wire() for shard in self.shards],
            "running": [held.summary() for held in self.store],
            "recent": list(self.recent),
        }

    def _dropped(self) -> dict[str, int]:
        """Sessions dropped, by reason. An eviction for another's growth, not for a newcomer, is a preemption."""
        dropped = {reason.value: count for reason, count in sorted(self.store.dropped.items())}
        if self.store.preempted:
            dropped[MissReason.EVICTED.value] -= self.store.preempted
            dropped["preempted"] = self.store.preempted
        return dropped

    async def close(self) -> None:
        """Drop all sessions and stop the lane."""
        for held in list(self.store):
            self.store.release(held.document.session)
        for task in list(self._background):
            task.cancel()
        await self.shards.close()
        await asyncio.gather(*self._background, return_exceptions=True)
        await asyncio.to_thread(self._lane.close)

    # -- open ---------------------------------------------------------------------------------------------------------

    async def _lease_shard(self, document: OpenDocument, *, in_use: bool) -> ShardLease:
        """The shard that the session will run on, loaded if need be; nothing is loaded for terms that cannot be met."""
        self._check_terms(document, self.shards.find(document.route.fingerprint, document.hop.layers).known)
        own = [hop.layers for hop in document.route.hops if hop.node_id == document.hop.node_id]
        if (needed := self.shards.count(document.route.fingerprint, own)) > self.shards.max_loaded:
            raise CacheFullError(
                f"the route needs {needed} shards of this node at once, which loads {self.shards.max_loaded}; "
                "raise its --max-loaded-shards",
                never=True,
            )
        return await self.shards.acquire(
            document.route.fingerprint,
            document.hop.layers,
            wait_s=document.step_deadline_ms / 1000 * DOWNSTREAM_MARGIN,
            make_idle=lambda shard: self.store.evict_idle(lambda held: held.shard is shard),
            in_use=in_use,
        )

    def _admit(self, key: SessionKey, document: OpenDocument, lease: ShardLease) -> OpenReply:
        """Take the session in; loading may have taken a while, and a twin of this call or a drain overtaken it."""
        known = self.store.find(key)
        if known is not None and known[0].document == document:
            lease.end()
            return OpenReply(self.boot, self._reserve(known[0]))
        if self.draining and known is None:
            raise DrainingError("this node is draining and takes no new sessions")
        backend = lease.shard.backend
        wrong = next((token for token in document.history if not 0 <= token < backend.vocab_size), None)
        if wrong is not None:
            raise BadFrameError(f"token id {wrong} lies outside the vocabulary of {backend.vocab_size}")
        state = backend.new_state(document.hop.layers.start) if document.cache else None
        session = HopSession(document, lease, state, history=list(document.history))
        reserve = self._reserve(session)
        self.store.admit(key, document.epoch, session, reserve)
        return OpenReply(self.boot, reserve)

    @staticmethod
    def _reserve(session: HopSession) -> int:
        """Bytes to set aside when the session opens."""
        document = session.document
        return session.room(min(document.prefill_length + GROWTH_QUANTUM, document.expected_length))

    @staticmethod
    def _check_terms(document: OpenDocument, shard: ShardInfo) -> None:
        if document.hidden_size != shard.hidden_size:
            raise BadFrameError(f"hidden size {document.hidden_size} asked for, the model has {shard.hidden_size}")
        if document.route.num_layers != shard.num_layers:
            raise BadFrameError(f"{document.route.num_layers} layers asked for, the model has {shard.num_layers}")
        if document.hop.dtype != shard.dtype:
            raise CacheMissError(
                f"the route has this hop compute in {document.hop.dtype}, the shard computes in {shard.dtype}",
                reason=MissReason.MODEL_MISMATCH,
            )
        if document.expected_length > shard.max_positions:
            raise BadFrameError(
                f"the session may come to {document.expected_length} positions, the model takes {shard.max_positions}"
            )
        if document.next_hop is None and len(document.history) != document.prefill_length:
            raise BadFrameError(
                f"the tail needs the {document.prefill_length} token ids before its first token, "
                f"not {len(document.history)}"
            )

    # -- forward ------------------------------------------------------------------------------------------------------

    async def _take_in(self, key: SessionKey, session: HopSession, frame: Frame, arrived: float) -> Run:
        """The run of this frame: the one that an identical frame began, or a new one in its turn."""
        frame_key = FrameKey.of(frame)
        deadline = arrived + frame.deadline_ms / 1000
        if frame_key not in session.runs:
            await self._await_turn(key, session, frame, frame_key, deadline)
        if (known := session.runs.get(frame_key)) is not None:  # a retry, or a twin that came while this one waited
            self._revive(session, frame, known, deadline)
            return known
        session.accepted = frame.position + frame.seq_len
        session.received_bytes += len(frame.body)
        kind = frame.phase.value if frame.cache else "stateless"
        session.frames[kind] = session.frames.get(kind, 0) + 1
        run = Run(asyncio.create_task(self._run(key, session, frame, frame_key, arrived, deadline)))
        self._keep(session, run.task)
        session.remember(frame_key, run)
        session.announce()
        return run

    async def _await_turn(
        self, key: SessionKey, session: HopSession, frame: Frame, frame_key: FrameKey, deadline: float
    ) -> None:
        """Wait until the frame is next and the queue has room, or its twin has been taken in."""
        if not frame.cache:
            if session.in_flight:
                raise BadFrameError("with the cache off one frame runs at a time")
            return
        give_up = min(deadline, self._clock.now() + EARLY_HOLD_S)
        while frame.position > session.accepted or session.in_flight >= MAX_QUEUED_FRAMES:
            try:
                async with asyncio.timeout(max(0.0, give_up - self._clock.now())):
                    await session.changed.wait()
            except TimeoutError:
                break
            self.store.require(key, frame.epoch)  # it may have left the store meanwhile
            if frame_key in session.runs:
                return
        if frame.position != session.accepted:
            raise CacheMissError(
                f"the session holds {session.accepted} positions here, the frame begins at {frame.position}",
                reason=MissReason.POSITION_MISMATCH,
            )
        if session.in_flight >= MAX_QUEUED_FRAMES:
            raise DeadlineError(f"{session.in_flight} frames of this session are still queued here")

    async def _run(
        self, key: SessionKey, session: HopSession, frame: Frame, frame_key: FrameKey, arrived: float, deadline: float
    ) -> FrameReply:
        """Run the frame on the own layers, then hand it on. Whatever goes wrong here costs the state."""
        try:
            limit = arrived + RUN_DEADLINES * session.document.step_deadline_ms / 1000
            outcome = await self._run_own_layers(key, session, frame, max(deadline, limit))
        except BaseException as error:
            self.store.drop_held(key, session, MissReason.FAILED)
            if isinstance(error, ForwardCancelledError):
                raise self._gone(key, frame.epoch) from error
            raise
        run = session.runs[frame_key]
        run.undelivered = outcome
        try:
            return await self._deliver(session, frame, run, outcome, arrived, max(deadline, run.deadline))
        except BaseException:
            if session.state is None:  # no room was taken to keep what would be delivered again; a retry runs anew
                session.runs.pop(frame_key, None)
            raise

    async def _run_own_layers(self, key: SessionKey, session: HopSession, frame: Frame, deadline: float) -> Outcome:
        shard, start = session.shard, frame.start_layer
        work = ShardWork(
            start=start,
            state=session.state,
            position=frame.position,
            seq_len=frame.seq_len,
            payload=frame.body,
            wire_dtype=session.document.wire_dtype,
            sample=frame.sample if session.is_tail else 0,
            cancelled=lambda: session.cancelled,
        )

        def finish(result: ShardResult) -> tuple[ShardResult, tuple[SampledToken, ...]]:
            tokens: tuple[SampledToken, ...] = ()
            if result.logits is not None:
                tokens = (self._sample_last(session, frame, result.logits),)
            session.measure_state()
            return result, tokens

        with self.store.lease(key, frame.epoch, session.room(frame.position + frame.seq_len)):
            try:
                async with asyncio.timeout(max(0.0, deadline - self._clock.now())):
                    turn = (key, frame.epoch)
                    (result, tokens), timing = await self._lane.run(turn, shard.backend, work, finish)
            except TimeoutError as error:
                raise DeadlineError(
                    f"layers {session.document.hop.layers} did not finish the frame at position {frame.position} in "
                    f"{RUN_DEADLINES} deadlines of a step"
                ) from error
        shard.measure(
            len(session.document.hop.layers),
            frame.seq_len,
            decode=frame.phase is Phase.DECODE,
            forward_s=timing.forward_s,
        )
        hop_timing = HopTiming(
            frame.hop_index,
            queue_ms=1000 * timing.queue_s,
            forward_ms=1000 * timing.forward_s,
            sample_ms=1000 * timing.finish_s if tokens else 0.0,
        )
        return Outcome(result.hidden, tokens, hop_timing)

    def _sample_last(self, session: HopSession, frame: Frame, logits: torch.Tensor) -> SampledToken:
        """The token after the frame's last position; the history grows by it, so that penalties see it."""
        position = frame.position + frame.seq_len
        if len(session.history) != position:
            raise CacheMissError(
                f"the tail knows {len(session.history)} token ids, the frame ends at position {position}",
                reason=MissReason.POSITION_MISMATCH,
            )
        params, prompt_length = session.document.sampling, session.document.prompt_length
        token = self._sample(logits[-1], params, session.history, prompt_length, position)
        session.history.append(token.id)
        return token

    async def _deliver(
        self, session: HopSession, frame: Frame, run: Run, outcome: Outcome, arrived: float, deadline: float
    ) -> FrameReply:
        """The reply: the own tokens at the tail, else what the next hop answers to the hidden states."""
        timing = outcome.timing
        position = frame.position + frame.seq_len
        next_hop = session.document.next_hop
        if next_hop is None or outcome.hidden is None:
            timing = replace(timing, total_ms=1000 * (self._clock.now() - arrived))
            return FrameReply(position, outcome.tokens, (timing,), self._if_draining(frame))
        left_ms = int(1000 * (deadline - self._clock.now()) * DOWNSTREAM_MARGIN)
        if left_ms < 1:
            raise DeadlineError(f"no time was left to hand position {frame.position} to the next hop")
        onward = replace(
            frame,
            hop_index=frame.hop_index + 1,
            start_layer=next_hop.layers.start,
            deadline_ms=left_ms,
            body=outcome.hidden,
        )
        reply = await self._transport.forward(next_hop.url, onward)
        run.undelivered = None
        timing = replace(timing, total_ms=1000 * (self._clock.now() - arrived), sent_bytes=len(outcome.hidden))
        draining = (*self._if_draining(frame), *reply.draining)
        return FrameReply(position, reply.tokens, (timing, *reply.timings), draining)

    def _if_draining(self, frame: Frame) -> tuple[int, ...]:
        """What a reply says of this hop where its node is about to leave."""
        return (frame.hop_index,) if self.draining else ()

    def _revive(self, session: HopSession, frame: Frame, run: Run, deadline: float) -> None:
        """A retry of a frame whose own part went well but whose delivery failed: only the delivery runs again."""
        run.deadline = max(run.deadline, deadline)
        if not run.task.done() or run.undelivered is None or run.task.cancelled():
            return
        if isinstance(run.task.exception(), HopUnreachableError | DeadlineError | BadFrameError):
            delivery = self._deliver(session, frame, run, run.undelivered, self._clock.now(), deadline)
            run.task = asyncio.create_task(delivery)
            self._keep(session, run.task)

    async def _outcome_of(self, run: Run, key: SessionKey, frame: Frame, arrived: float) -> FrameReply:
        """Wait for a run without owning it: a caller that leaves, or whose time is up, does not take the run along.

        So a frame that waited long for its turn is not lost: the identical one joins it.
        """
        task = run.task
        await asyncio.wait([task], timeout=max(0.0, arrived + frame.deadline_ms / 1000 - self._clock.now()))
        if not task.done():
            raise DeadlineError(f"the frame at position {frame.position} is not done after {frame.deadline_ms} ms")
        if task.cancelled():
            raise self._gone(key, frame.epoch)
        return task.result()

    def _gone(self, key: SessionKey, epoch: int) -> CacheMissError:
        """The miss of a frame whose session left the store while it ran."""
        try:
            self.store.require(key, epoch)
        except CacheMissError as miss:
            return miss
        return CacheMissError(f"a frame of session {key.session} was cancelled", reason=MissReason.FAILED)

    def _keep(self, session: HopSession, task: asyncio.Task[Any]) -> None:
        self._background.add(task)

        def done(finished: asyncio.Task[Any]) -> None:
            self._background.discard(finished)
            session.announce()  # one less in flight
            if not finished.cancelled() and (error := finished.exception()) is not None:
                level = logging.DEBUG if isinstance(error, MeshnetError) else logging.ERROR
                logger.log(level, "a frame failed: %s", error, exc_info=error if level == logging.ERROR else None)

        task.add_done_callback(done)

    def _marked(self, hop_index: int) -> _Marked:
        return _Marked(hop_index, self.boot, self.misses)


class _Marked:
    """Errors that leave this block name the hop and the boot id; foreign ones become `HopFailedError`.

    Misses are counted by reason, those of this hop alone: another's come through with their hop named.
    """

    def __init__(self, hop_index: int, boot: str, misses: Counter[MissReason]) -> None:
        self._hop_index = hop_index
        self._boot = boot
        self._misses = misses

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or not isinstance(error, Exception):
            return
        if isinstance(error, HopError):
            if error.hop_index is None:
                error.hop_index = self._hop_index
                error.boot = self._boot
                if isinstance(error, CacheMissError):
                    self._misses[error.reason] += 1
            return
        if isinstance(error, MeshnetError) and not isinstance(error, UnsupportedModelError):
            raise BadFrameError(error.message, hop_index=self._hop_index, boot=self._boot) from error
        raise HopFailedError(f"{error}", hop_index=self._hop_index, boot=self._boot) from error
