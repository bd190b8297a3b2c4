"""What a node does with a session: the `HopEndpoint` behind every transport.

Opens sessions on the shards it has, checks their frames and has them run in order (`frame_runs`): an early one waits
briefly, an identical one is answered from its last run, anything else out of place is refused. Knows no HTTP and no
tensors; state lives in the store.

    forward(frame) ── check ── in order? ── lane (own layers) ──┬─ tail: sample ───────────── reply
                        │         │                             └─ else: next hop's forward ─ reply + own timing
                      refuse   hold / miss        a chunk that is not the last is acknowledged once the next hop has it
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from functools import partial
from typing import Any

from meshnet_core.clock import Clock
from meshnet_core.errors import (
    BadFrameError,
    CacheFullError,
    CacheMissError,
    DrainingError,
    HopError,
    MeshnetError,
    MissReason,
)
from meshnet_core.frames import MAX_CHUNK, Frame, FrameReply, HopTiming
from meshnet_core.json_log import about
from meshnet_core.link_times import LinkTimes
from meshnet_core.membership import ShardInfo
from meshnet_core.open_document import OpenDocument, OpenReply, ProbeReply
from meshnet_core.prefix import Mark
from meshnet_core.settle import settle
from meshnet_core.transport import FrameAnswered, HopTransport
from meshnet_node.cache_store import CacheStore, SessionKey
from meshnet_node.constraint import Constraint, GrammarCompiler
from meshnet_node.forward_lane import ForwardLane
from meshnet_node.frame_delivery import DOWNSTREAM_MARGIN
from meshnet_node.frame_runs import FrameRuns, is_acknowledged
from meshnet_node.frame_terms import check_terms, check_token_ids
from meshnet_node.hop_session import HopSession
from meshnet_node.marked_errors import MarkedErrors
from meshnet_node.own_layers import OwnLayers, SampleFunction
from meshnet_node.prefix_use import PrefixUse
from meshnet_node.shard_pool import ShardLease, ShardPool

GROWTH_QUANTUM = MAX_CHUNK  # positions set aside beyond the prefill, so that a session seldom has to ask for room


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
        links: how long posts to the next hops take; of its own if not given.
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
        links: LinkTimes | None = None,
    ) -> None:
        self.boot = boot
        self.shards = shards
        self.store = store
        self.draining = False
        self.drains = 0
        self.misses: Counter[MissReason] = Counter()  # frames and opens refused for want of state
        self.recent: deque[dict[str, Any]] = deque(maxlen=32)  # what is remembered of ended sessions, for people
        self.links = links or LinkTimes(clock)
        self._lane = lane
        self._prefixes = PrefixUse(store)
        self._runs = FrameRuns(
            store=store,
            own=OwnLayers(store, self._prefixes, lane, sample, clock),
            transport=transport,
            clock=clock,
            is_draining=lambda: self.draining,
            links=self.links,
        )
        self._clock = clock
        self._grammars = GrammarCompiler()

    async def open(self, document: OpenDocument) -> OpenReply:
        """Take a session in, with room for its prefill and a growth quantum, or refuse it unchanged."""
        with (
            MarkedErrors(document.hop_index, self.boot, self.misses),
            about(session=document.session, epoch=document.epoch, hop=document.hop_index, route=document.route),
        ):
            key = SessionKey(document.session, document.hop_index)
            self.store.sweep()
            known = self.store.find(key)
            if known is not None and known[1] == document.epoch:
                if known[0].document != document:
                    raise BadFrameError("this session and epoch are open on other terms; a retry repeats its terms")
                return self._opened(known[0])
            if self.draining and not self.store.knows(document.session):  # one that was here goes on, in a newer epoch
                raise DrainingError("this node is draining and takes no new sessions")
            lease = await self._lease_shard(document, in_use=known is not None)
            try:
                constraint = await self._constraint(document, lease)
                return self._admit(key, document, lease, constraint)
            except BaseException:
                lease.end()
                raise

    def begin(self, frame: Frame, answered: FrameAnswered) -> bool:
        """See `meshnet_core.transport.PromptEndpoint`."""
        arrived = self._clock.now()
        key = SessionKey(frame.session, frame.hop_index)
        known = self.store.find(key)
        if known is None or known[1] != frame.epoch:
            return False  # `forward` says what is wrong
        session = known[0]
        try:
            check_terms(session, frame)
        except MeshnetError:
            return False

        def told(outcome: FrameReply | Exception) -> None:
            answered(outcome if isinstance(outcome, FrameReply) else self._marked(outcome, frame, session))

        return self._runs.prompt.begin(key, session, frame, arrived, told)

    def _marked(self, error: Exception, frame: Frame, session: HopSession) -> Exception:
        """An error of a run, as `forward` raises it."""
        try:
            with MarkedErrors(frame.hop_index, self.boot, self.misses):
                if isinstance(error, HopError) and error.hop_index is None:
                    error.position = session.accepted
                raise error
        except MeshnetError as marked:
            return marked

    async def forward(self, frame: Frame) -> FrameReply:
        """Run a frame here and on the hops after this one."""
        answer: asyncio.Future[FrameReply] = asyncio.get_running_loop().create_future()
        if self.begin(frame, partial(settle, answer)):
            return await answer
        arrived = self._clock.now()
        key = SessionKey(frame.session, frame.hop_index)
        with MarkedErrors(frame.hop_index, self.boot, self.misses):
            session = self.store.require(key, frame.epoch)
            try:
                check_terms(session, frame)
                with about(session=frame.session, epoch=frame.epoch, hop=frame.hop_index, route=session.document.route):
                    run = await self._runs.take_in(key, session, frame, arrived)
                if is_acknowledged(frame, session):
                    queued = HopTiming(frame.hop_index, total_ms=1000 * (self._clock.now() - arrived))
                    position = frame.position + frame.seq_len
                    draining = (frame.hop_index,) if self.draining else ()
                    return FrameReply(position, timings=(queued,), draining=draining)
                return await self._runs.outcome_of(run, key, frame, arrived)
            except HopError as error:
                if error.hop_index is None:
                    error.position = session.accepted
                raise

    async def release(self, session: str, through_epoch: int | None = None, keep: tuple[Mark, ...] = ()) -> int:
        """Free the session on every hop it has here; what runs of it stops between layers."""
        left = []
        for held in self.store:
            of_it = held.document.session == session
            if of_it and (through_epoch is None or held.document.epoch <= through_epoch):
                self.recent.append(held.summary())
                left.append((held, self._prefixes.left_by(held, keep)))
        freed = self.store.release(session, through_epoch)
        for held, marks in left:
            self._prefixes.keep(held, marks)
        return freed

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
            "batches": {str(frames): count for frames, count in sorted(self._lane.batches.items())},
            "sessions": len(self.store),
            "state_bytes": sum(held.nbytes for held in self.store),
            "reserved_bytes": self.store.nbytes,
            "budget_bytes": self.store.limits.budget_bytes,
            "prefixes": len(self.store.prefixes),
            "prefix_bytes": self.store.prefixes.nbytes,
            "prefixes_evicted": self.store.prefixes.evicted,
            "prefill_positions_saved": self._prefixes.saved,
            "max_sessions": self.store.limits.max_sessions,
            "session_ttl_s": self.store.limits.ttl_s,
            "dropped": self._dropped(),
            "misses": {reason.value: count for reason, count in sorted(self.misses.items())},
            "drains": self.drains,
            "loaded_shards": self.shards.loaded,
            "max_loaded_shards": self.shards.max_loaded,
            "shard_loads": self.shards.loads,
            "shard_drops": self.shards.drops,
            "shards": [shard.info(self._clock.now()).to_wire() for shard in self.shards],
            "links": [link.to_wire() for link in self.links.told()],
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
        """Drop all sessions and prefixes, and stop the lane."""
        for held in list(self.store):
            self.store.release(held.document.session)
        await self._runs.close()
        self.store.prefixes.give_way(self.store.prefixes.nbytes)
        await self.shards.close()
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

    async def _constraint(self, document: OpenDocument, lease: ShardLease) -> Constraint | None:
        """The grammar of the answer at the place where the answer stands; None where it is free."""
        if document.grammar is None or document.next_hop is not None:
            return None
        fingerprint = document.route.fingerprint
        tokenizer = self.shards.find(fingerprint, document.hop.layers).text_files.get("tokenizer.json")
        answer = document.history[document.prompt_length :]
        return await self._grammars.compile(
            document.grammar, fingerprint, tokenizer, lease.shard.backend.vocab_size, answer
        )

    def _admit(
        self, key: SessionKey, document: OpenDocument, lease: ShardLease, constraint: Constraint | None
    ) -> OpenReply:
        """Take the session in; loading may have taken a while, and a twin of this call or a drain overtaken it."""
        known = self.store.find(key)
        if known is not None and known[0].document == document:
            lease.end()
            return self._opened(known[0])
        if self.draining and not self.store.knows(document.session):
            raise DrainingError("this node is draining and takes no new sessions")
        backend = lease.shard.backend
        named = (*document.history, *(token for token, _ in document.sampling.logit_bias))
        check_token_ids(named, backend.vocab_size)
        state = backend.new_state(document.hop.layers.start) if document.cache else None
        on_end = partial(self._lane.forget, (key, document.epoch))
        session = HopSession(
            document, lease, state, history=list(document.history), constraint=constraint, on_end=on_end
        )
        self._prefixes.offer(session)  # what it could begin from is the last of the prefixes to give way to it
        session.reserved = self._reserved(session)
        reserve, step_s = self._reserve(session), document.step_deadline_ms / 1000
        self.store.admit(key, document.epoch, session, reserve, step_s, stateless=not document.cache)
        return self._opened(session)

    def _opened(self, session: HopSession) -> OpenReply:
        held = self._prefixes.offer(session)
        snapshots = self._prefixes.are_copied(session)
        return OpenReply(self.boot, self._reserve(session), held, snapshots, session.falls_back)

    @staticmethod
    def _reserve(session: HopSession) -> int:
        """Bytes to set aside when the session opens."""
        return session.room(HopService._reserved(session))

    @staticmethod
    def _reserved(session: HopSession) -> int:
        """Positions that those are for."""
        document = session.document
        return min(document.prefill_length + GROWTH_QUANTUM, document.expected_length)

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
