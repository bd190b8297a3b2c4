"""The generation loop: one session, from prompt token ids to the last token, across the hops of a route.

Tokens are the truth here and caches are disposable: the loop holds prompt and answer, and any failure of a hop ends in
a new epoch that prefills both again, as `recovery` decides. Knows no text and no HTTP.

    start ── route ── open on every hop ── prefill in chunks, several in flight ── decode step ── ... ── release
               ^                                                                      │
               └───────────── a failure: next_action, next epoch ────────────────────┘
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing

from meshnet_core.clock import Clock
from meshnet_core.coverage import ModelSummary
from meshnet_core.errors import HopFailedError, LayersUnavailableError, MeshnetError, RequestRefusedError
from meshnet_core.frames import MAX_CHUNK, FrameReply
from meshnet_core.ids import mint_session_id
from meshnet_core.link_times import LinkTimes
from meshnet_core.membership import Snapshot
from meshnet_core.route import Route
from meshnet_core.sampling import SampledToken
from meshnet_core.transport import HopTransport
from meshnet_gateway.blame import BlameMemory
from meshnet_gateway.chunk_choice import choose_cut
from meshnet_gateway.epoch_frames import EpochFrames
from meshnet_gateway.epoch_steps import EpochSteps, PrefillProgress
from meshnet_gateway.generation_report import GenerationReport
from meshnet_gateway.generation_request import GenerationRequest
from meshnet_gateway.generation_trace import NO_TRACE, GenerationTrace, Tracing
from meshnet_gateway.hop_calls import HopCalls
from meshnet_gateway.mending import Mending
from meshnet_gateway.ngram_drafter import NgramDrafter
from meshnet_gateway.place import Place, Routes
from meshnet_gateway.prefill_cut import PrefillCut
from meshnet_gateway.prefix_memory import PrefixMemory
from meshnet_gateway.prefix_reuse import PrefixReuse
from meshnet_gateway.recovery import Replay
from meshnet_gateway.route_stages import stages_of
from meshnet_gateway.speculation import OFF, Drafter, Speculate, Speculation
from meshnet_gateway.step_frames import StepFrames
from meshnet_gateway.step_times import BothTraces, StepTimes
from meshnet_gateway.waiting_room import WaitingRoom

__all__ = ["Generation", "GenerationEngine", "GenerationRequest", "PrefillProgress", "Routes"]

logger = logging.getLogger(__name__)

Event = PrefillProgress | SampledToken


class GenerationEngine:
    """Makes generations over one transport.

    Args:
        routes: where routes come from.
        transport: reaches the hops.
        clock: measures.
        step_deadline_s: time for one step, all hops together.
        chunk: positions in one prefill frame, at most; no more than `MAX_CHUNK`.
        measured: what is known of the nodes: prefills over several hops are cut by it, and else as long as may be.
        recovery: how lost state is made again, where a request does not say.
        sleep: waits, in seconds, before another attempt.
        room: where generations wait until nodes have room for them; one of its own if not given.
        tracing: is told where the time of each generation goes; None tells nobody.
        speculate: how drafts are used, where a request does not say.
        drafter: makes what drafts a generation.
    """

    def __init__(
        self,
        routes: Routes,
        transport: HopTransport,
        clock: Clock,
        *,
        step_deadline_s: float = 60.0,
        chunk: int = MAX_CHUNK,
        measured: Callable[[], Awaitable[Snapshot]] | None = None,
        recovery: Replay = Replay.FAST,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        room: WaitingRoom | None = None,
        tracing: Tracing | None = None,
        speculate: Speculate = OFF,
        drafter: Callable[[], Drafter] = NgramDrafter,
    ) -> None:
        self.routes = routes
        self.transport = transport
        self.clock = clock
        self.step_deadline_ms = int(1000 * step_deadline_s)
        self.chunk = min(chunk, MAX_CHUNK)
        self.measured = measured
        self.recovery = recovery
        self.speculate = speculate
        self.drafter = drafter
        self.blame = BlameMemory(clock)
        self.links = LinkTimes(clock)  # to the nodes that were first hops
        self.sleep = sleep
        self.room = room or WaitingRoom(clock)
        self.tracing = tracing
        self.arrivals = itertools.count()
        self.prefixes = PrefixMemory()

    def start(self, request: GenerationRequest) -> Generation:
        """A generation, with its session id minted; nothing happens before it is iterated."""
        if not request.prompt_ids or request.max_tokens < 1:
            raise RequestRefusedError("a generation needs at least one prompt token and max_tokens of at least 1")
        return Generation(self, request)


class Generation:
    """One answer under way: iterate it for `PrefillProgress` and `SampledToken`, then `aclose` it, always.

    Attributes:
        session: its id, the same on every frame.
        finish_reason: ``"stop"`` or ``"length"`` once it has ended by itself.
    """

    def __init__(self, engine: GenerationEngine, request: GenerationRequest) -> None:
        self.session = mint_session_id()
        self.finish_reason: str | None = None
        self._engine = engine
        self._request = request
        self._arrival = next(engine.arrivals)
        self._answer: list[int] = []
        self._cut: PrefillCut | None = None  # of the newest prefill
        self._tokens = list(request.prompt_ids)  # and the answer
        self._calls = HopCalls(self.session, engine.transport, engine.sleep)
        self._exact = (request.recovery or engine.recovery) is Replay.EXACT
        self._report = GenerationReport(self.session, len(request.prompt_ids), engine.clock, exact=self._exact)
        # Frames of several positions are not those whose bits are promised.
        speculate = OFF if self._exact else request.speculate or engine.speculate
        self._speculation = Speculation(speculate, request.stop_ids, engine.drafter())
        self._prefix = PrefixReuse(
            request.prefix, request.prompt_ids, request.stop_ids, exact=self._exact, memory=engine.prefixes
        )
        self._mending = Mending(
            self._calls,
            self._report,
            engine.blame,
            engine.clock,
            engine.sleep,
            cache=request.cache,
            patience_s=engine.step_deadline_ms / 1000,
        )
        self._trace: GenerationTrace = NO_TRACE
        self._times = StepTimes(engine.clock) if request.profile else None
        self._events = self._run()

    def __aiter__(self) -> AsyncGenerator[Event]:
        return self._events

    def report(self) -> dict[str, object]:
        """What happened so far, JSON-ready: session, route, epochs, mode, times, speed, bytes per step."""
        profile = {} if self._times is None else {"profile": self._times.to_json()}
        return {**self._report.to_json(), "cached_tokens": self._prefix.cached_tokens, **profile}

    async def aclose(self) -> None:
        """End it, wherever it is, and free the session on every hop. Idempotent."""
        try:
            await self._events.aclose()
        finally:
            # Shielded: a caller that is itself being cancelled must not leave state behind.
            await asyncio.shield(asyncio.ensure_future(self._give_back()))

    async def _give_back(self) -> None:
        await self._calls.give_back(self._prefix.left(self._tokens))
        self._engine.room.freed()

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def _run(self) -> AsyncGenerator[Event]:
        request, tracing = self._request, self._engine.tracing
        if tracing is not None:
            self._trace = tracing.begin(self.session, request.model, len(request.prompt_ids))
        if self._times is not None:
            self._trace = BothTraces(self._trace, self._times)
        try:
            async with aclosing(self._traced()) as events:
                async for event in events:
                    with self._trace.delivering():
                        yield event
        finally:
            self._trace.end(tokens=len(self._answer), finish_reason=self.finish_reason)

    async def _traced(self) -> AsyncGenerator[Event]:
        request = self._request
        with self._trace.part("model"):
            model = await self._engine.routes.model(request.model)
        if request.fingerprint not in (None, model.fingerprint):
            # Token ids of one tokenizer say something else to another model.
            raise LayersUnavailableError(
                f"{request.model} is served with other contents since this request came; send it again"
            )
        if len(request.prompt_ids) + 1 > model.max_positions:
            raise RequestRefusedError(
                f"the prompt has {len(request.prompt_ids)} tokens; {request.model} takes {model.max_positions} "
                "positions, prompt and answer together",
                param="messages",
            )
        place = Place(
            self._engine,
            model,
            request,
            self._answer,
            self._arrival,
            calls=self._calls,
            mending=self._mending,
            prefix=self._prefix,
            report=self._report,
            exact=self._exact,
            trace=self._trace,
        )
        while self.finish_reason is None:
            try:
                async with aclosing(self._epoch_at(place, model)) as events:
                    async for event in events:
                        yield event
            except MeshnetError as failure:
                self._speculation.failed(failure)
                with self._trace.part("mend"):
                    place.route = await self._mending.after(failure, place.route)
        self._mending.served(place.route)

    async def _epoch_at(self, place: Place, model: ModelSummary) -> AsyncGenerator[Event]:
        """One epoch: open, prefill what there is, decode until the end, a failure, or the move to another route."""
        with self._trace.part("place"):
            route = await place.opened()
        self._mending.opened()
        self._report.epoch_began(route, cached=not self._mending.stateless)
        self._calls.leave_hops_outside(route, place.epoch)
        engine = self._engine
        steps = EpochSteps(route, engine.transport, self._mending, engine.clock, engine.links, self._trace)
        frames = EpochFrames(
            self.session,
            place.epoch,
            route.hops[0].layers.start,
            self._engine.step_deadline_ms,
            cache=not self._mending.stateless,
            protocol=route.protocol,
        )
        step_frames = StepFrames(frames, place.way_back)
        async with aclosing(self._first_step(steps, frames, route)) as events:
            async for event in events:
                if isinstance(event, FrameReply):
                    reply = event
                else:
                    yield event
        _check_single(reply)
        while True:
            for token in self._taken(reply, model.max_positions):
                yield token
            if self.finish_reason is not None:
                return
            if reply.draining and await place.moves(reply.draining, route):
                return
            if await place.returns_to_cache():
                return
            if self._mending.stateless:
                reply = await steps.send(frames.whole(self._tokens))
                _check_single(reply)
                self._report.stepped(reply)
            else:
                reply = await self._step(steps, step_frames, model.max_positions)

    async def _step(self, steps: EpochSteps, frames: StepFrames, max_positions: int) -> FrameReply:
        """The reply to the next step, with as many drafts as pay and as the answer has place for."""
        left = min(self._request.max_tokens - len(self._answer), max_positions - self._length) - 1
        draft = self._speculation.drafts(self._tokens, min(left, frames.most_drafts(self._length)))
        frame = frames.next(self._tokens, draft)
        began = self._engine.clock.now()
        reply = await steps.send(frame)
        frames.took(frame, reply)
        took_ms = 1000 * (self._engine.clock.now() - began)
        self._speculation.came(reply, took_ms, positions=frame.seq_len, drafted=len(draft))
        if frame.seq_len == 1:
            self._report.stepped(reply)
        self._report.speculated(self._speculation.drafted, self._speculation.accepted)
        return reply

    async def _first_step(
        self, steps: EpochSteps, frames: EpochFrames, route: Route
    ) -> AsyncGenerator[PrefillProgress | FrameReply]:
        """Prompt and answer so far, up to the reply with the token after them."""
        prompt, answer = self._request.prompt_ids, self._answer
        if self._mending.stateless:
            yield await steps.send(frames.whole((*prompt, *answer)))
            return
        replay = self._request.recovery or self._engine.recovery
        if self._cut is None or replay is not Replay.EXACT:
            self._cut = await self._cut_for(route)
        cut = self._cut
        prefill = frames.prefill(prompt, answer, cut, replay, begin=self._prefix.begin, cuts=self._prefix.cuts)
        with self._trace.part("prefill"):
            async with aclosing(steps.prefill(prefill, self._length, cut.longest, cut.in_flight)) as events:
                async for event in events:
                    if isinstance(event, FrameReply):
                        reply = event
                    else:
                        self._speculation.sees(self._tokens)
                        yield event
        yield reply

    async def _cut_for(self, route: Route) -> PrefillCut:
        """How the prefill of prompt and answer so far is cut, by what is known of the route's nodes now."""
        engine, most = self._engine, PrefillCut((self._engine.chunk,))
        if engine.measured is None or len(route.hops) == 1:
            return most
        try:
            snapshot = await engine.measured()
        except MeshnetError:
            return most
        entry_ms = {link.node_id: link.rtt_ms for link in engine.links.told()}
        stages = stages_of(route, snapshot, entry_ms)
        begin = self._prefix.begin
        return choose_cut(stages, self._length - begin, engine.chunk, begin)

    def _taken(self, reply: FrameReply, max_positions: int) -> Iterator[SampledToken]:
        """The tokens that a step gave, each taken in, up to the one that ends the answer."""
        for token in reply.tokens:
            self._mending.token()
            self._prefix.proven()
            if token.id in self._request.stop_ids:
                self.finish_reason = "stop"
                return
            self._answer.append(token.id)
            self._tokens.append(token.id)
            self._report.token()
            yield token
            if len(self._answer) >= self._request.max_tokens or self._length >= max_positions:
                self.finish_reason = "length"
                return

    @property
    def _length(self) -> int:
        return len(self._tokens)


def _check_single(reply: FrameReply) -> None:
    if len(reply.tokens) != 1:
        raise HopFailedError(f"the tail answered with {len(reply.tokens)} tokens to a step that samples one")
