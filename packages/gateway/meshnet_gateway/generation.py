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
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from meshnet_core.clock import Clock
from meshnet_core.coverage import ModelSummary
from meshnet_core.demand import Demand
from meshnet_core.dtypes import wire_dtype
from meshnet_core.errors import (
    DrainingError,
    HopError,
    HopFailedError,
    LayersUnavailableError,
    MeshnetError,
    RequestRefusedError,
)
from meshnet_core.frames import MAX_CHUNK, Frame, FrameReply, Phase
from meshnet_core.grammar import Grammar
from meshnet_core.ids import mint_session_id
from meshnet_core.link_times import LinkTimes
from meshnet_core.open_document import OpenDocument
from meshnet_core.route import Route
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_core.transport import HopTransport
from meshnet_gateway.blame import BlameMemory
from meshnet_gateway.epoch_frames import EpochFrames
from meshnet_gateway.generation_report import GenerationReport
from meshnet_gateway.hop_calls import HopCalls
from meshnet_gateway.prefix_reuse import PrefixReuse, PrefixWish
from meshnet_gateway.recovery import (
    BUSY_RETRIES,
    MAX_RETRIES,
    Action,
    Fail,
    History,
    Probe,
    Replay,
    RePrefill,
    Reroute,
    Retry,
    Stateless,
    next_action,
)
from meshnet_gateway.waiting_room import WaitingRoom

logger = logging.getLogger(__name__)

CHUNKS_IN_FLIGHT = 2  # one runs on the first hop while the one before it runs on the next
REPLAYS_IN_FLIGHT = 4  # single positions are little work; a hop queues as many frames of one session
USUAL_ANSWER = 256  # tokens that an answer is planned for at most: most end before what they may have
MOVE_POLL_S = 1.0  # between two questions for a route without the nodes that drain


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


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """``done`` of ``total`` positions have been taken in by the first hop."""

    done: int
    total: int


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
        self._epoch = -1
        self._route: Route | None = None
        self._move_asked_at: float | None = None
        self._history = History(stateless=not request.cache, patience_s=engine.step_deadline_ms / 1000)
        self._failing_since: float | None = None
        self._calls = HopCalls(self.session, engine.transport, engine.sleep)
        self._report = GenerationReport(self.session, len(request.prompt_ids), engine.clock)
        exact = (request.recovery or engine.recovery) is Replay.EXACT
        self._prefix = PrefixReuse(request.prefix, request.prompt_ids, request.stop_ids, exact=exact)
        self._events = self._run()

    def __aiter__(self) -> AsyncGenerator[Event]:
        return self._events

    def report(self) -> dict[str, object]:
        """What happened so far, JSON-ready: session, route, epochs, mode, times, speed, bytes per step."""
        return {**self._report.to_json(), "cached_tokens": self._prefix.cached_tokens}

    async def aclose(self) -> None:
        """End it, wherever it is, and free the session on every hop. Idempotent."""
        await self._events.aclose()
        # Shielded: a caller that is itself being cancelled must not leave state behind.
        left = self._prefix.left((*self._request.prompt_ids, *self._answer))
        await asyncio.shield(asyncio.ensure_future(self._calls.give_back(left)))
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
                self._route = await self._recover(failure, self._route)
        for hop in self._route.hops if self._route is not None else ():
            self._engine.blame.forgive(hop.node_id)

    async def _new_route(self, model: ModelSummary) -> Route:
        """A route without the nodes blamed here, and without those blamed lately by others unless it takes them."""
        excluded, blamed = self._history.excluded, self._engine.blame.excluded()
        if blamed - excluded:
            try:
                return await self._engine.routes.route(model, excluded | blamed, self._demand())
            except LayersUnavailableError:
                logger.info(
                    "session %s: nobody covers for the nodes blamed lately; they are let in again", self.session
                )
        return await self._engine.routes.route(model, excluded, self._demand())

    def _demand(self) -> Demand:
        """What is still to be done: to take in prompt and answer so far, and to make some of what is left."""
        left = self._request.max_tokens - len(self._answer)
        return Demand(
            prompt=self._length,
            answer=max(1, min(left, USUAL_ANSWER)),
            entry_ms={link.node_id: link.rtt_ms for link in self._engine.links.told()},
            explore=self._epoch < 0,
        )

    async def _recover(self, failure: MeshnetError, route: Route | None) -> Route | None:
        """Carry out what follows ``failure``; the route to go on with, None for a new one."""
        node_id = _blamed(failure, route)
        action = await self._decide(failure, route, self._history)
        logger.info("session %s: %s: %s -> %s", self.session, type(failure).__name__, failure, action)
        self._report.failed(failure, type(action).__name__, node_id)
        self._history = replace(self._history, failures=(*self._history.failures, failure), retries=0)
        match action:
            case Fail(error):
                raise error
            case RePrefill(wait_s):
                await self._engine.sleep(wait_s)
                return route
            case Reroute(excluded, wait_s):
                if node_id in excluded and not isinstance(failure, DrainingError):
                    self._engine.blame.blame(node_id)
                await self._engine.sleep(wait_s)
                self._history = replace(self._history, excluded=excluded)
                return None
            case Stateless():
                self._history = replace(self._history, stateless=True)
                return route
            case Retry() | Probe():
                # A retry of the very frame is done where the frame is (`_forward`); one that comes here was no frame.
                return route

    async def _decide(self, failure: MeshnetError, route: Route | None, history: History) -> Action:
        """What follows ``failure``; the node to blame is asked first where its answer would matter."""
        now = self._engine.clock.now()
        self._failing_since = now if self._failing_since is None else self._failing_since
        self._calls.tell_restart(failure, _blamed(failure, route))
        history = replace(history, failing_s=now - self._failing_since)
        node_id = _blamed(failure, route)
        action = next_action(failure, node_id, history)
        if isinstance(action, Probe) and route is not None and isinstance(failure, HopError):
            busy = await self._calls.is_busy(route.hops[failure.hop_index or 0].url)
            action = next_action(failure, node_id, replace(history, busy=busy))
        return action

    async def _epoch_of(self, model: ModelSummary) -> AsyncGenerator[Event]:
        """One epoch: open, prefill what there is, decode until the end, a failure, or the move to another route."""
        route = await self._admit(model)
        self._report.epoch_began(route, cached=not self._history.stateless)
        self._calls.leave_hops_outside(route, self._epoch)
        if self._history.stateless:
            reply = await self._whole_sequence(route)
        else:
            async with aclosing(self._prefill(route)) as events:
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
            if reply.draining and await self._may_move(reply.draining, route, model):
                return
            reply = await (self._whole_sequence(route) if self._history.stateless else self._decode_step(route))

    def _accept(self, reply: FrameReply) -> SampledToken | None:
        """The token that a step gave; None if it ends the answer."""
        if len(reply.tokens) != 1:
            raise HopFailedError(f"the tail answered with {len(reply.tokens)} tokens to a step that samples one")
        token = reply.tokens[0]
        self._history = replace(self._history, failures=(), retries=0)
        self._failing_since = None
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

    # -- admission ----------------------------------------------------------------------------------------------------

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
                self._route = await self._new_route(model)
            elif tries:
                with suppress(MeshnetError):  # the one there was is as good as none
                    self._route = await self._new_route(model)
            tries += 1
            self._epoch += 1  # what a refused open left behind is over, so that each try is an epoch of its own
            await self._open(self._route, model)
            return self._route

        try:
            return await self._engine.room.admit(model.name, self._arrival, attempt)
        finally:
            self._report.waited(tried - arrived)

    async def _may_move(self, draining: tuple[int, ...], route: Route, model: ModelSummary) -> bool:
        """Whether there is a route without the hops that drain, taken then for the next epoch. Asked now and then."""
        now = self._engine.clock.now()
        if self._move_asked_at is not None and now < self._move_asked_at + MOVE_POLL_S:
            return False
        self._move_asked_at = now
        nodes = [route.hops[index].node_id for index in draining if index < len(route.hops)]
        excluded = self._history.excluded | frozenset(nodes)
        try:
            excluded_too = self._engine.blame.excluded()
            self._route = await self._engine.routes.route(model, excluded | excluded_too, self._demand())
        except MeshnetError:
            return False  # it goes on where it is, for as long as that lasts
        self._history = replace(self._history, excluded=excluded)
        logger.info("session %s: %s about to leave -> %s", self.session, ", ".join(nodes), self._route)
        for node_id in nodes:
            self._report.failed(DrainingError("the node is about to leave"), "Reroute", node_id)
        return True

    # -- calls --------------------------------------------------------------------------------------------------------

    async def _open(self, route: Route, model: ModelSummary) -> None:
        """Open on all hops at once; where one refuses, what the others set aside is freed again."""
        tokens = (*self._request.prompt_ids, *self._answer)
        whole = OpenDocument(
            session=self.session,
            epoch=self._epoch,
            hop_index=0,
            route=route,
            wire_dtype=wire_dtype(hop.dtype for hop in route.hops),
            hidden_size=model.hidden_size,
            cache=not self._history.stateless,
            sampling=self._request.sampling,
            prompt_length=len(self._request.prompt_ids),
            prefill_length=len(tokens),
            expected_length=min(len(self._request.prompt_ids) + self._request.max_tokens, model.max_positions),
            step_deadline_ms=self._engine.step_deadline_ms,
            history=tokens,
            prefix=self._prefix.terms(tokens, cached=not self._history.stateless),
            grammar=self._request.grammar,
        )
        try:
            self._prefix.agree(await self._calls.open(whole))
        except MeshnetError:
            # no frame was sent that could be sent again
            self._history = replace(self._history, retries=MAX_RETRIES + BUSY_RETRIES)
            raise

    async def _prefill(self, route: Route) -> AsyncGenerator[PrefillProgress | FrameReply]:
        """Send prompt and answer so far, several frames in flight; progress now and then, then the last reply."""
        total, told = self._length, 0
        replay = self._request.recovery or self._engine.recovery
        frames = self._frames(route).prefill(
            self._request.prompt_ids,
            self._answer,
            self._engine.chunk,
            replay,
            begin=self._prefix.begin,
            cuts=self._prefix.cuts,
        )
        in_flight: deque[tuple[int, asyncio.Task[FrameReply]]] = deque()
        try:
            for frame in frames:
                end = frame.position + frame.seq_len
                while len(in_flight) >= (REPLAYS_IN_FLIGHT if frame.phase is Phase.DECODE else CHUNKS_IN_FLIGHT):
                    done, task = in_flight.popleft()
                    await task
                    if frame.phase is not Phase.DECODE or done >= told + self._engine.chunk:
                        told = done
                        yield PrefillProgress(done, total)
                in_flight.append((end, asyncio.create_task(self._forward(route, frame))))
            while in_flight:
                done, task = in_flight.popleft()
                reply = await task
                yield PrefillProgress(done, total)
            yield reply
        finally:
            for _, task in in_flight:
                task.cancel()
            await asyncio.gather(*(task for _, task in in_flight), return_exceptions=True)

    async def _decode_step(self, route: Route) -> FrameReply:
        return await self._forward(route, self._frames(route).decode(self._length - 1, self._answer[-1]))

    async def _whole_sequence(self, route: Route) -> FrameReply:
        return await self._forward(route, self._frames(route).whole((*self._request.prompt_ids, *self._answer)))

    def _frames(self, route: Route) -> EpochFrames:
        return EpochFrames(
            self.session,
            self._epoch,
            route.hops[0].layers.start,
            self._engine.step_deadline_ms,
            cache=not self._history.stateless,
            protocol=route.protocol,
        )

    async def _forward(self, route: Route, frame: Frame) -> FrameReply:
        """Send a frame; where recovery says so, the identical one again."""
        retries = 0
        while True:
            try:
                sent_at = self._engine.clock.now()
                reply = await self._engine.transport.forward(route.hops[0].url, frame)
                if frame.phase is Phase.DECODE and reply.timings:
                    elapsed_ms = 1000 * (self._engine.clock.now() - sent_at)
                    self._engine.links.took(route.hops[0].node_id, elapsed_ms, reply.timings[0].total_ms)
                return reply  # noqa: TRY300 - measured where it is asked
            except HopError as failure:
                action = await self._decide(failure, route, replace(self._history, retries=retries))
                if not isinstance(action, Retry):
                    # What is decided of it next must not begin with retries again.
                    self._history = replace(self._history, retries=MAX_RETRIES + BUSY_RETRIES)
                    raise
                self._report.failed(failure, "Retry", _blamed(failure, route))
                await self._engine.sleep(action.wait_s)
                retries += 1


def _blamed(failure: MeshnetError, route: Route | None) -> str | None:
    if route is None or not isinstance(failure, HopError) or failure.hop_index is None:
        return None
    return route.hops[failure.hop_index].node_id if failure.hop_index < len(route.hops) else None
