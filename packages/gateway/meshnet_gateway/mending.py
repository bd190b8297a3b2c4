"""What one generation does about failures: it carries out what `recovery` decides, and remembers what was tried.

Knows which nodes to leave out and whether there is a cache to use; sends no frames and opens nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from meshnet_core.clock import Clock
from meshnet_core.errors import DrainingError, HopError, LayersUnavailableError, MeshnetError, TrackerUnreachableError
from meshnet_core.route import Hop, Route
from meshnet_gateway.blame import BlameMemory
from meshnet_gateway.generation_report import GenerationReport
from meshnet_gateway.hop_calls import HopCalls
from meshnet_gateway.recovery import (
    BUSY_RETRIES,
    MAX_RETRIES,
    Action,
    Fail,
    History,
    Probe,
    RePrefill,
    Reroute,
    Retry,
    Stateless,
    next_action,
    tries_cache_again,
)

logger = logging.getLogger(__name__)

_NO_MORE_RETRIES = MAX_RETRIES + BUSY_RETRIES


Planner = Callable[[frozenset[str]], Awaitable[Route]]  # a route without these nodes


class Mending:
    """The failures of one generation.

    Args:
        calls: probe nodes, and know who restarted.
        report: is told what happened.
        blame: which nodes were blamed lately, by any generation.
        clock: measures how long layers lack.
        sleep: waits, in seconds, before another attempt.
        cache: False keeps to the stateless path.
        patience_s: for how long lacking layers are waited for.

    Attributes:
        stateless: no cache is in use.
    """

    def __init__(
        self,
        calls: HopCalls,
        report: GenerationReport,
        blame: BlameMemory,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]],
        *,
        cache: bool,
        patience_s: float,
    ) -> None:
        self._calls = calls
        self._report = report
        self._blame = blame
        self._clock = clock
        self._sleep = sleep
        self._cache = cache
        self._history = History(stateless=not cache, patience_s=patience_s, begun=False)
        self._decided: list[tuple[HopError, Action]] = []  # of frames that failed, until that is carried out
        self._lacking_since: float | None = None
        self._before_lacking = self._history
        self._stateless_tokens = 0
        self._returns = 0

    @property
    def stateless(self) -> bool:
        return self._history.stateless

    # -- failures -----------------------------------------------------------------------------------------------------

    async def sends_again(self, failure: HopError, route: Route, retries: int) -> bool:
        """Whether a frame that failed is sent once more, said when its time has come; else `after` comes next."""
        reporter = None
        if failure.boot is None and failure.hop_index and failure.hop_index < len(route.hops):
            reporter = route.hops[failure.hop_index - 1].node_id  # it said so itself: then nobody reported it
        action = await self._decide(failure, route, retries, reporter)
        if not isinstance(action, Retry):
            self._decided.append((failure, action))
            return False
        hop = _blamed(failure, route)
        self._report.failed(failure, "Retry", None if hop is None else hop.node_id)
        await self._sleep(action.wait_s)
        return True

    async def after(self, failure: MeshnetError, route: Route | None) -> Route | None:
        """Carry out what follows ``failure``; the route to go on with, None for a new one.

        Raises:
            MeshnetError: there is nothing more to try.
        """
        action = next((action for past, action in self._decided if past is failure), None)
        self._decided.clear()
        if action is None:  # no frame's: there is nothing that could be sent again
            action = await self._decide(failure, route, _NO_MORE_RETRIES)
        hop = _blamed(failure, route)
        logger.info(
            "session %s: %s: %s -> %s", self._calls.session, type(failure).__name__, failure, action,
            extra={"session": self._calls.session, "route": route, "hop": _hop_of(failure)},
        )  # fmt: skip
        self._report.failed(failure, type(action).__name__, None if hop is None else hop.node_id)
        self._history = replace(self._history, failures=(*self._history.failures, failure))
        match action:
            case Fail(error):
                raise error
            case RePrefill(wait_s):
                await self._sleep(wait_s)
                return route
            case Reroute(excluded, wait_s, blamed, doubt):
                if blamed is not None:
                    self._blame.blame(blamed)
                doubts = self._history.doubts | ({doubt} if doubt is not None else frozenset())
                self._history = replace(self._history, excluded=excluded, doubts=doubts)
                await self._sleep(wait_s)
                return None
            case Stateless():
                self._history = replace(self._history, stateless=True)
                self._stateless_tokens = 0
                return route
            case Retry() | Probe():  # only a frame is sent again, and who is probed has been
                return route

    async def _decide(
        self, failure: MeshnetError, route: Route | None, retries: int, reporter: str | None = None
    ) -> Action:
        """What follows ``failure``; the node to blame is asked first where its answer would matter."""
        hop = _blamed(failure, route)
        node_id = None if hop is None else hop.node_id
        self._calls.tell_restart(failure, node_id)
        now = self._clock.now()
        if isinstance(failure, LayersUnavailableError | TrackerUnreachableError) and self._lacking_since is None:
            self._lacking_since, self._before_lacking = now, self._history
        lacking_s = None if self._lacking_since is None else now - self._lacking_since
        history = replace(self._history, retries=retries, lacking_s=lacking_s)
        action = next_action(failure, node_id, history, reporter)
        if isinstance(action, Probe) and hop is not None:
            probed = await self._calls.probed(hop.url)
            action = next_action(failure, node_id, replace(history, probed=probed), reporter)
        return action

    # -- what goes well -----------------------------------------------------------------------------------------------

    def opened(self) -> None:
        """All hops of a route are open: no layers lack, and what failed while they did is no longer counted."""
        self._history = replace(self._history, begun=True)
        if self._lacking_since is not None:
            self._lacking_since = None
            self._history = replace(self._history, failures=self._before_lacking.failures)

    def token(self) -> None:
        """A token came: what failed before it is over."""
        if self._history.failures:
            self._history = replace(self._history, failures=())
        self._stateless_tokens += self._history.stateless

    async def returns_to_cache(self, plan: Planner) -> Route | None:
        """A fresh route on which a cache is to be tried again now; None where it goes on without."""
        if not (self._cache and self.stateless and tries_cache_again(self._stateless_tokens, self._returns)):
            return None
        self._returns += 1
        try:
            route = await self.new_route(plan)
        except MeshnetError:
            return None
        self._history = replace(self._history, stateless=False)
        logger.info(
            "session %s: with a cache again", self._calls.session,
            extra={"session": self._calls.session, "route": route},
        )  # fmt: skip
        return route

    # -- routes -------------------------------------------------------------------------------------------------------

    async def new_route(self, plan: Planner) -> Route:
        """One without the nodes blamed here, and without those blamed lately by others unless it takes them."""
        excluded, blamed = self._history.excluded, self._blame.excluded()
        if blamed - excluded:
            try:
                return await plan(excluded | blamed)
            except LayersUnavailableError:
                logger.info(
                    "session %s: nobody covers for the nodes blamed lately; they are let in again",
                    self._calls.session,
                    extra={"session": self._calls.session},
                )
        return await plan(excluded)

    async def route_without(self, nodes: frozenset[str], plan: Planner) -> Route:
        """One that leaves out ``nodes`` too, and all that were ever blamed."""
        return await plan(self._history.excluded | self._blame.excluded() | nodes)

    def left(self, nodes: frozenset[str]) -> None:
        """The session moves away from nodes that are about to leave."""
        self._history = replace(self._history, excluded=self._history.excluded | nodes)
        for node_id in sorted(nodes):
            self._report.failed(DrainingError("the node is about to leave"), "Reroute", node_id)

    def served(self, route: Route | None) -> None:
        """The answer came to its end on ``route``."""
        for hop in route.hops if route is not None else ():
            self._blame.forgive(hop.node_id)


def _hop_of(failure: MeshnetError) -> int | None:
    return failure.hop_index if isinstance(failure, HopError) else None


def _blamed(failure: MeshnetError, route: Route | None) -> Hop | None:
    """The hop that a failure names."""
    if route is None or not isinstance(failure, HopError) or failure.hop_index is None:
        return None
    return route.hops[failure.hop_index] if failure.hop_index < len(route.hops) else None
