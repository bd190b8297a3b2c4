"""What to do after a failure, as a pure decision. It sees the error and what was tried; it moves nothing.

failure                              first           then                     in the end
cache miss                           re-prefill      re-prefill               stateless
hop unreachable                      retry           reroute without it       fail
deadline, draining                   reroute without the hop                  fail
no room (429)                        wait            wait                     fail
exception in a forward               re-prefill      reroute without it       fail
no route, once others were blamed    wait, with the blamed let in again       fail
bad frame, protocol, too large, ...  fail: the same would happen again
"""

from __future__ import annotations

from dataclasses import dataclass

from meshnet_core.errors import (
    CacheFullError,
    CacheMissError,
    DeadlineError,
    DrainingError,
    HopFailedError,
    HopUnreachableError,
    LayersUnavailableError,
    MeshnetError,
    TrackerUnreachableError,
)

MAX_ATTEMPTS = 12  # failures in a row without a token between them
MAX_RETRIES = 2  # of one frame: a route has more than one connection that can break
MISSES_BEFORE_STATELESS = 3
BACKOFF_S = 0.1
MAX_BACKOFF_S = 3.0


@dataclass(frozen=True, slots=True)
class Retry:
    """Send the identical frame again; hops answer it from their last run."""

    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RePrefill:
    """Prefill prompt and answer so far again, on the same route, under a new epoch."""

    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reroute:
    """Ask for a route without the nodes named, and prefill there under a new epoch."""

    excluded: frozenset[str]
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stateless:
    """Go on without any cache: every step runs the whole sequence."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Give up and tell the client why."""

    error: MeshnetError


Action = Retry | RePrefill | Reroute | Stateless | Fail


@dataclass(frozen=True, slots=True)
class History:
    """What was tried since the last token.

    Attributes:
        failures: errors since then, oldest first.
        excluded: nodes that routes leave out.
        retries: how often the frame that failed was sent again already.
        stateless: no cache is in use.
    """

    failures: tuple[MeshnetError, ...] = ()
    excluded: frozenset[str] = frozenset()
    retries: int = 0
    stateless: bool = False


def next_action(failure: MeshnetError, node_id: str | None, history: History) -> Action:  # noqa: PLR0911 - one return a row
    """Decide what follows ``failure``.

    Args:
        failure: what went wrong.
        node_id: the node that is to blame, where one is.
        history: what was tried before it; ``failure`` is not in it yet.
    """
    attempts = len(history.failures)
    if attempts >= MAX_ATTEMPTS:
        return Fail(failure)
    wait_s = min(MAX_BACKOFF_S, BACKOFF_S * 2**attempts)
    without = history.excluded | ({node_id} if node_id is not None else frozenset())
    match failure:
        case CacheMissError():
            misses = sum(isinstance(past, CacheMissError) for past in history.failures) + 1
            if misses > MISSES_BEFORE_STATELESS:
                return Fail(failure) if history.stateless and misses > 2 * MISSES_BEFORE_STATELESS else Stateless()
            return RePrefill()
        case HopUnreachableError():
            if history.retries < MAX_RETRIES:
                return Retry(BACKOFF_S * history.retries)
            return Reroute(without, wait_s if attempts else 0.0)
        case DeadlineError() | DrainingError():
            return Reroute(without)
        case HopFailedError():
            failed_before = any(isinstance(past, HopFailedError) for past in history.failures)
            return Reroute(without, wait_s) if failed_before else RePrefill()
        case CacheFullError():
            return RePrefill(wait_s)
        case LayersUnavailableError() | TrackerUnreachableError() if history.failures:
            # Whoever was blamed may be back, and is better than nobody.
            return Reroute(frozenset(), wait_s)
        case _:
            return Fail(failure)
