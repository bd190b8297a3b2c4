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
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from copy import copy
from dataclasses import dataclass
from typing import Protocol

from meshnet_core.clock import Clock
from meshnet_core.coverage import ModelSummary
from meshnet_core.demand import Demand
from meshnet_core.dtypes import wire_dtype
from meshnet_core.errors import CacheFullError, HopFailedError, MeshnetError, RequestRefusedError
from meshnet_core.frames import MAX_CHUNK, FrameReply
from meshnet_core.grammar import Grammar
from meshnet_core.ids import mint_session_id
from meshnet_core.link_times import LinkTimes
from meshnet_core.open_document import OpenDocument
from meshnet_core.route import Route
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_core.transport import HopTransport
from meshnet_gateway.blame import BlameMemory
from meshnet_gateway.epoch_frames import EpochFrames
from meshnet_gateway.epoch_steps import EpochSteps, PrefillProgress
from meshnet_gateway.generation_report import GenerationReport
from meshnet_gateway.hop_calls import HopCalls, StayedError
from meshnet_gateway.mending import Mending, Planner
from meshnet_gateway.prefix_reuse import PrefixReuse, PrefixWish
from meshnet_gateway.recovery import Replay
from meshnet_gateway.waiting_room import WaitingRoom

__all__ = ["Generation", "GenerationEngine", "GenerationRequest", "PrefillProgress", "Routes"]

logger = logging.getLogger(__name__)

USUAL_ANSWER = 256  # tokens that an answer is planned for at most: most end before what they may have
MOVE_POLL_S = 1.0  # between two questions for a route without the nodes that drain; doubled where there was no room
MOVE_OPEN_S = 2.0  # the answer stands still while the new route is opened


class Routes(Protocol):
    """Where routes come from."""

    async def model(self, name: str) -> ModelSummary: ...

    async def route(self, model: ModelSummary, excluded: frozenset[str], demand: Demand | None = None) -> Route: ...


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer to make.

    Attributes:
        model: name of a served model.
        prompt_ids: token ids of the prompt, at least one.
        max_tokens: the most tokens to answer with, at least one.
        sampling: how to choose them.
        stop_ids: tokens that end the answer; they are not part of it.
        cache: False takes the stateless path from the start.
        recovery: how lost state is made again; None takes the engine's way.
        prefix: what it may take from sessions before it and leave to others; None for neither.
        grammar: what the answer is held to; None leaves it free.
    """

    model: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    cache: bool = True
    recovery: Replay | None = None
    prefix: PrefixWish | None = None
    grammar: Grammar | None = None


Event = PrefillProgress | SampledToken


class GenerationEngine:
    """Makes generations over one transport.

    Args:
        routes: where routes come from.
        transport: reaches the hops.
        clock: measures.
        step_deadline_s: time for one step, all hops together.
        chunk: positions in one prefill frame, at most `MAX_CHUNK`.
        recovery: how lost state is made again, where a request does not say.
        sleep: waits, in seconds, before another attempt.
        room: where generations wait until nodes have room for them; one of its own if not given.
    """

    def __init__(
        self,
        routes: Routes,
        transport: HopTransport,
        clock: Clock,
        *,
        step_deadline_s: float = 60.0,
        chunk: int = MAX_CHUNK,
        recovery: Replay = Replay.FAST,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        room: WaitingRoom | None = None,
    ) -> None:
        self.routes = routes
        self.transport = transport
        self.clock = clock
        self.step_deadline_ms = int(1000 * step_deadline_s)
        self.chunk = min(chunk, MAX_CHUNK)
        self.recovery = recovery
        self.blame = BlameMemory(clock)
        self.links = LinkTimes(clock)  # to the nodes that were first hops
        self.sleep = sleep
        self.room = room or WaitingRoom(clock)
        self.arrivals = itertools.count()

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
        self._epochs = itertools.count()
        self._epoch = -1  # of the frames that are sent
        self._route: Route | None = None
        self._opened = False  # `_route` is open for the next epoch already
        self._patient = True  # the next epoch waits for room where there is none
        self._move_poll_s = MOVE_POLL_S
        self._move_asked_at: float | None = None
        self._calls = HopCalls(self.session, engine.transport, engine.sleep)
        self._report = GenerationReport(self.session, len(request.prompt_ids), engine.clock)
        exact = (request.recovery or engine.recovery) is Replay.EXACT
        self._prefix = PrefixReuse(request.prefix, request.prompt_ids, request.stop_ids, exact=exact)
        self._mending = Mending(
            self._calls,
            self._report,
            engine.blame,
            engine.clock,
            engine.sleep,
            cache=request.cache,
            patience_s=engine.step_deadline_ms / 1000,
        )
        self._events = self._run()

    def __aiter__(self) -> AsyncGenerator[Event]:
        return self._events

    def report(self) -> dict[str, object]:
        """What happened so far, JSON-ready: session, route, epochs, mode, times, speed, bytes per step."""
        return {**self._report.to_json(), "cached_tokens": self._prefix.cached_tokens}

    async def aclose(self) -> None:
        """End it, wherever it is, and free the session on every hop. Idempotent."""
        try:
            await self._events.aclose()
        finally:
            # Shielded: a caller that is itself being cancelled must not leave state behind.
            await asyncio.shield(asyncio.ensure_future(self._give_back()))

    async def _give_back(self) -> None:
        await self._calls.give_back(self._prefix.left((*self._request.prompt_ids, *self._answer)))
        self._engine.room.freed()

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def _run(self) -> AsyncGenerator[Event]:
        request = self._request
        model = await self._engine.routes.model(request.model)
        if len(request.prompt_ids) + 1 > model.max_positions:
            raise RequestRefusedError(
                f"the prompt has {len(request.prompt_ids)} tokens; {request.model} takes {model.max_positions} "
                "positions, prompt and answer together",
                param="messages",
            )
        while self.finish_reason is None:
            try:
                async with aclosing(self._epoch_of(model)) as events:
                    async for event in events:
                        yield event
            except MeshnetError as failure:
                self._route = await self._mending.after(failure, self._route)
        self._mending.served(self._route)

    def _planner(self, model: ModelSummary) -> Planner:
        """Plans routes for what is still to be done: to take in prompt and answer so far, and make some of the rest."""

        async def plan(excluded: frozenset[str]) -> Route:
            left = self._request.max_tokens - len(self._answer)
            demand = Demand(
                prompt=self._length,
                answer=max(1, min(left, USUAL_ANSWER)),
                entry_ms={link.node_id: link.rtt_ms for link in self._engine.links.told()},
                explore=self._epoch < 0,
            )
            return await self._engine.routes.route(model, excluded, demand)

        return plan

    async def _epoch_of(self, model: ModelSummary) -> AsyncGenerator[Event]:
        """One epoch: open, prefill what there is, decode until the end, a failure, or the move to another route."""
        route = await self._open_route(model)
        self._mending.opened()
        self._report.epoch_began(route, cached=not self._mending.stateless)
        self._calls.leave_hops_outside(route, self._epoch)
        steps = EpochSteps(route, self._engine.transport, self._mending, self._engine.clock, self._engine.links)
        frames = self._frames(route)
        async with aclosing(self._first_step(steps, frames)) as events:
            async for event in events:
                if isinstance(event, FrameReply):
                    reply = event
                else:
                    yield event
        while True:
            token = self._accept(reply)
            if token is None:
                return
            yield token
            if len(self._answer) >= self._request.max_tokens or self._length >= model.max_positions:
                self.finish_reason = "length"
                return
            if reply.draining and await self._moves(reply.draining, route, model):
                return
            if await self._returns_to_cache(model):
                return
            if self._mending.stateless:
                frame = frames.whole((*self._request.prompt_ids, *self._answer))
            else:
                frame = frames.decode(self._length - 1, self._answer[-1])
            reply = await steps.send(frame)

    async def _first_step(self, steps: EpochSteps, frames: EpochFrames) -> AsyncGenerator[PrefillProgress | FrameReply]:
        """Prompt and answer so far, up to the reply with the token after them."""
        prompt, answer = self._request.prompt_ids, self._answer
        if self._mending.stateless:
            yield await steps.send(frames.whole((*prompt, *answer)))
            return
        replay = self._request.recovery or self._engine.recovery
        prefill = frames.prefill(
            prompt, answer, self._engine.chunk, replay, begin=self._prefix.begin, cuts=self._prefix.cuts
        )
        async with aclosing(steps.prefill(prefill, self._length, self._engine.chunk)) as events:
            async for event in events:
                yield event

    def _accept(self, reply: FrameReply) -> SampledToken | None:
        """The token that a step gave; None if it ends the answer."""
        if len(reply.tokens) != 1:
            raise HopFailedError(f"the tail answered with {len(reply.tokens)} tokens to a step that samples one")
        token = reply.tokens[0]
        self._mending.token()
        self._prefix.proven()
        if token.id in self._request.stop_ids:
            self.finish_reason = "stop"
            return None
        self._answer.append(token.id)
        self._report.token(reply)
        return token

    @property
    def _length(self) -> int:
        return len(self._request.prompt_ids) + len(self._answer)

    # -- a place ------------------------------------------------------------------------------------------------------

    async def _open_route(self, model: ModelSummary) -> Route:
        """The route that the next epoch is open on."""
        patient, self._patient = self._patient, True
        if self._opened and self._route is not None:
            self._opened = False
            return self._route
        if patient:
            return await self._admit(model)
        if self._route is None:
            self._route = await self._mending.new_route(self._planner(model))
        try:
            await self._open(self._route, model)
        except CacheFullError as full:  # it does not wait for what it can do without
            raise CacheFullError(full.message, never=True, hop_index=full.hop_index, boot=full.boot) from full
        return self._route

    async def _admit(self, model: ModelSummary) -> Route:
        """Open a new epoch in this generation's turn; the route that it is open on.

        Raises:
            NoRoomError: it waited in vain.
            CacheFullError: it would wait in vain.
            MeshnetError: something else is in the way, on `_route`.
        """
        if self._epoch >= 0 and self._engine.room.waiting:
            # Nobody holds room on some hops while it waits for room on others: two could wait for each other.
            self._calls.let_go(self._epoch)
        arrived = tried = self._engine.clock.now()
        tries = 0

        async def attempt() -> Route:
            nonlocal tried, tries
            tried = self._engine.clock.now()
            if self._route is None:
                self._route = await self._mending.new_route(self._planner(model))
            elif tries:
                with suppress(MeshnetError):  # the one there was is as good as none
                    self._route = await self._mending.new_route(self._planner(model))
            tries += 1
            await self._open(self._route, model)
            return self._route

        try:
            return await self._engine.room.admit(model.name, self._arrival, attempt)
        finally:
            self._report.waited(tried - arrived)

    async def _moves(self, draining: tuple[int, ...], route: Route, model: ModelSummary) -> bool:
        """Whether the session has a place on a route without the hops that drain; asked now and then.

        It keeps the one it has until it has another: nodes that are full would leave it with none.
        """
        now = self._engine.clock.now()
        if self._move_asked_at is not None and now < self._move_asked_at + self._move_poll_s:
            return False
        self._move_asked_at = now
        nodes = frozenset(route.hops[index].node_id for index in draining if index < len(route.hops))
        try:
            new = await self._mending.route_without(nodes, self._planner(model))
        except MeshnetError:
            return False  # it goes on where it is, for as long as that lasts
        before, terms = copy(self._prefix), self._terms(new, model)
        try:
            replies = await self._calls.open_beside(terms, route, MOVE_OPEN_S)
        except StayedError as stayed:
            logger.info("session %s: stays with %s: %s", self.session, ", ".join(sorted(nodes)), stayed)
            self._prefix = before
            self._move_poll_s *= 2
            return False
        except MeshnetError:
            self._route, self._epoch = new, terms.epoch
            raise
        self._prefix.agree(replies)
        self._route, self._epoch, self._opened, self._move_poll_s = new, terms.epoch, True, MOVE_POLL_S
        logger.info("session %s: %s about to leave -> %s", self.session, ", ".join(sorted(nodes)), new)
        self._mending.left(nodes)
        return True

    async def _returns_to_cache(self, model: ModelSummary) -> bool:
        """Whether a session without state tries a cache again, on a fresh route; without one it stays as it is."""
        if (route := await self._mending.returns_to_cache(self._planner(model))) is None:
            return False
        self._route, self._patient = route, False
        return True

    async def _open(self, route: Route, model: ModelSummary) -> None:
        """Open a new epoch on all hops at once; where one refuses, what the others set aside is freed again."""
        terms = self._terms(route, model)
        self._epoch = terms.epoch
        self._prefix.agree(await self._calls.open(terms))

    def _terms(self, route: Route, model: ModelSummary) -> OpenDocument:
        """Those of a new epoch. What a refused open left behind is over, so that each try is an epoch of its own."""
        tokens = (*self._request.prompt_ids, *self._answer)
        return OpenDocument(
            session=self.session,
            epoch=next(self._epochs),
            hop_index=0,
            route=route,
            wire_dtype=wire_dtype(hop.dtype for hop in route.hops),
            hidden_size=model.hidden_size,
            cache=not self._mending.stateless,
            sampling=self._request.sampling,
            prompt_length=len(self._request.prompt_ids),
            prefill_length=len(tokens),
            expected_length=min(len(self._request.prompt_ids) + self._request.max_tokens, model.max_positions),
            step_deadline_ms=self._engine.step_deadline_ms,
            history=tokens,
            prefix=self._prefix.terms(tokens, cached=not self._mending.stateless),
            grammar=self._request.grammar,
        )

    def _frames(self, route: Route) -> EpochFrames:
        return EpochFrames(
            self.session,
            self._epoch,
            route.hops[0].layers.start,
            self._engine.step_deadline_ms,
            cache=not self._mending.stateless,
            protocol=route.protocol,
        )
