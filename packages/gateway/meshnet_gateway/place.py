"""Where one generation's session is open: its route and epoch, and how it gets, changes and keeps them.

Knows no frames; what failures make of it is `mending`'s to decide.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from typing import Protocol

from meshnet_core.clock import Clock
from meshnet_core.coverage import ModelSummary
from meshnet_core.demand import Demand
from meshnet_core.dtypes import wire_dtype
from meshnet_core.errors import CacheFullError, MeshnetError
from meshnet_core.link_times import LinkTimes
from meshnet_core.open_document import FallBack, OpenDocument, OpenReply
from meshnet_core.route import Route
from meshnet_gateway.generation_report import GenerationReport
from meshnet_gateway.generation_request import GenerationRequest
from meshnet_gateway.generation_trace import NO_TRACE, GenerationTrace
from meshnet_gateway.hop_calls import HopCalls, StayedError
from meshnet_gateway.mending import Mending
from meshnet_gateway.prefix_reuse import PrefixReuse
from meshnet_gateway.step_frames import fall_back_of
from meshnet_gateway.waiting_room import WaitingRoom

logger = logging.getLogger(__name__)

USUAL_ANSWER = 256  # tokens that an answer is planned for at most: most end before what they may have
MOVE_POLL_S = 1.0  # between two questions for a route without the nodes that drain; doubled where there was no room
MOVE_OPEN_S = 2.0  # the answer stands still while the new route is opened


class Routes(Protocol):
    """Where routes come from."""

    async def model(self, name: str) -> ModelSummary: ...

    async def route(self, model: ModelSummary, excluded: frozenset[str], demand: Demand | None = None) -> Route: ...


class Surroundings(Protocol):
    """What all generations of a gateway share; the engine is one."""

    @property
    def routes(self) -> Routes: ...

    @property
    def room(self) -> WaitingRoom: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def links(self) -> LinkTimes: ...

    @property
    def step_deadline_ms(self) -> int: ...


class Place:
    """One session's place on the hops of a route.

    Args:
        engine: what all generations share.
        model, request: what is asked.
        answer: token ids made so far; grows.
        arrival: the generation's place among all; a lower one came earlier.
        calls: reach the hops.
        mending: knows which nodes to leave out, and whether there is a cache to use.
        prefix: what the session begins from.
        report: is told how long it waited.
        exact: its frames run alone at every hop, so that replaying them gives the same bits.
        trace: is told of routes and opens.

    Attributes:
        route: the newest, open or not; None asks for a new one.
        epoch: the newest that was to be opened on it; -1 before the first.
        way_back: how its hops fall back from drafts that were wrong; None where they take none.
    """

    def __init__(
        self,
        engine: Surroundings,
        model: ModelSummary,
        request: GenerationRequest,
        answer: Sequence[int],
        arrival: int,
        *,
        calls: HopCalls,
        mending: Mending,
        prefix: PrefixReuse,
        report: GenerationReport,
        exact: bool,
        trace: GenerationTrace = NO_TRACE,
    ) -> None:
        self.route: Route | None = None
        self.epoch = -1
        self.way_back: FallBack | None = None
        self._engine = engine
        self._model = model
        self._request = request
        self._answer = answer
        self._arrival = arrival
        self._calls = calls
        self._mending = mending
        self._prefix = prefix
        self._report = report
        self._exact = exact
        self._trace = trace
        self._epochs = itertools.count()
        self._opened = False  # the route is open for the next epoch already
        self._patient = True  # the next epoch waits for room where there is none
        self._move_poll_s = MOVE_POLL_S
        self._move_asked_at: float | None = None

    async def opened(self) -> Route:
        """The route that the next epoch is open on.

        Raises:
            NoRoomError: it waited in vain.
            CacheFullError: it would wait in vain.
            MeshnetError: something else is in the way, on `route`.
        """
        patient, self._patient = self._patient, True
        if self._opened and self.route is not None:
            self._opened = False
            return self.route
        if patient:
            return await self._admitted()
        self.route = self.route or await self._mending.new_route(self._plan)
        try:
            await self._open(self.route)
        except CacheFullError as full:  # it does not wait for what it can do without
            raise CacheFullError(full.message, never=True, hop_index=full.hop_index, boot=full.boot) from full
        return self.route

    async def moves(self, draining: tuple[int, ...], route: Route) -> bool:
        """Whether the session has a place on a route without the hops that drain; asked now and then.

        It keeps the one it has until it has another: nodes that are full would leave it with none.
        """
        now = self._engine.clock.now()
        if self._move_asked_at is not None and now < self._move_asked_at + self._move_poll_s:
            return False
        self._move_asked_at = now
        nodes = frozenset(route.hops[index].node_id for index in draining if index < len(route.hops))
        try:
            new = await self._mending.route_without(nodes, self._plan)
        except MeshnetError:
            return False  # it goes on where it is, for as long as that lasts
        before, terms = copy(self._prefix), self._terms(new)
        try:
            replies = await self._calls.open_beside(terms, route, MOVE_OPEN_S)
        except StayedError as stayed:
            logger.info(
                "session %s: stays with %s: %s", terms.session, ", ".join(sorted(nodes)), stayed,
                extra={"session": terms.session, "route": route},
            )  # fmt: skip
            self._prefix.become(before)
            self._move_poll_s *= 2
            return False
        except MeshnetError:
            self.route, self.epoch = new, terms.epoch
            raise
        self._agree(new, replies)
        self.route, self.epoch, self._opened, self._move_poll_s = new, terms.epoch, True, MOVE_POLL_S
        logger.info(
            "session %s: %s about to leave -> %s", terms.session, ", ".join(sorted(nodes)), new,
            extra={"session": terms.session, "route": new},
        )  # fmt: skip
        self._mending.left(nodes)
        return True

    async def returns_to_cache(self) -> bool:
        """Whether a session without state tries a cache again, on a fresh route; without one it stays as it is."""
        if (route := await self._mending.returns_to_cache(self._plan)) is None:
            return False
        self.route, self._patient = route, False
        return True

    async def _admitted(self) -> Route:
        """Open a new epoch in this generation's turn; the route that it is open on."""
        if self.epoch >= 0 and self._engine.room.waiting:
            # Nobody holds room on some hops while it waits for room on others: two could wait for each other.
            self._calls.let_go(self.epoch)
        arrived = tried = self._engine.clock.now()
        tries = 0

        async def attempt() -> Route:
            nonlocal tried, tries
            tried = self._engine.clock.now()
            if self.route is None:
                self.route = await self._mending.new_route(self._plan)
            elif tries:
                with suppress(MeshnetError):  # the one there was is as good as none
                    self.route = await self._mending.new_route(self._plan)
            tries += 1
            await self._open(self.route)
            return self.route

        try:
            return await self._engine.room.admit(self._model.name, self._arrival, attempt)
        finally:
            self._report.waited(tried - arrived)

    async def _plan(self, excluded: frozenset[str]) -> Route:
        """A route for what is still to be done: to take in prompt and answer so far, and make some of the rest."""
        left = self._request.max_tokens - len(self._answer)
        held = self._prefix.held(self._model.fingerprint, (*self._request.prompt_ids, *self._answer))
        demand = Demand(
            prompt=len(self._request.prompt_ids) + len(self._answer),
            answer=max(1, min(left, USUAL_ANSWER)),
            entry_ms={link.node_id: link.rtt_ms for link in self._engine.links.told()},
            held=held,
            explore=self.epoch < 0 and not held,
        )
        with self._trace.part("route"):
            return await self._engine.routes.route(self._model, excluded, demand)

    async def _open(self, route: Route) -> None:
        """Open a new epoch on all hops at once; where one refuses, what the others set aside is freed again."""
        terms = self._terms(route)
        self.epoch = terms.epoch
        with self._trace.part("open"):
            replies = await self._calls.open(terms)
        self._agree(route, replies)

    def _agree(self, route: Route, replies: Sequence[OpenReply]) -> None:
        self._prefix.agree(route, replies)
        self.way_back = fall_back_of(replies)

    def _terms(self, route: Route) -> OpenDocument:
        """Those of a new epoch. What a refused open left behind is over, so that each try is an epoch of its own."""
        prompt, most = self._request.prompt_ids, len(self._request.prompt_ids) + self._request.max_tokens
        tokens = (*prompt, *self._answer)
        return OpenDocument(
            session=self._calls.session,
            epoch=next(self._epochs),
            hop_index=0,
            route=route,
            wire_dtype=wire_dtype(hop.dtype for hop in route.hops),
            hidden_size=self._model.hidden_size,
            cache=not self._mending.stateless,
            sampling=self._request.sampling,
            prompt_length=len(prompt),
            prefill_length=len(tokens),
            expected_length=min(most, self._model.max_positions),
            step_deadline_ms=self._engine.step_deadline_ms,
            history=tokens,
            prefix=self._prefix.terms(tokens, cached=not self._mending.stateless),
            grammar=self._request.grammar,
            exact=self._exact,
        )
