"""What to do after a failure, as a pure decision. It sees the error and what was tried; it moves nothing.

failure                              first           then                     in the end
cache miss                           re-prefill      re-prefill               stateless
other model, layers, protocol there   reroute without the hop                  fail
hop unreachable                      retry           probe, as below          fail
deadline                             probe           busy: retry once more    fail
                                                     else: reroute without it
draining                             reroute without the hop                  fail
no room (429), of a frame            re-prefill, once there is room           fail
no room, ever                        stateless                                fail
no room, after waiting for it        fail: `waiting_room` has had its say
exception in a forward               re-prefill      reroute without it       fail
no route, once others were blamed    wait, with the blamed let in again       fail, with the layers that lack
bad frame (cut on its way?)          retry           re-prefill               fail
too large, ...                       fail: the same would happen again

A probe tells *queued* from *hung*: a hop that answers it and has frames waiting is busy, and blaming it would only move
the load elsewhere together with a prefill.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from meshnet_core.errors import (
    BadFrameError,
    CacheFullError,
    CacheMissError,
    DeadlineError,
    DrainingError,
    HopFailedError,
    HopUnreachableError,
    LayersUnavailableError,
    MeshnetError,
    MissReason,
    ProtocolMismatchError,
    TrackerUnreachableError,
)
from meshnet_gateway.waiting_room import NoRoomError

MAX_ATTEMPTS = 12  # failures in a row without a token between them
MAX_RETRIES = 2  # of one frame: a route has more than one connection that can break
BUSY_RETRIES = 1  # of one frame more, where the hop to blame says that it is busy
MISSES_BEFORE_STATELESS = 3
BACKOFF_S = 0.1
MAX_BACKOFF_S = 3.0


class Replay(enum.StrEnum):
    """How lost state is made again.

    ``FAST`` prefills prompt and answer in chunks: in lower precision its kernels may round apart from those that first
    ran. ``EXACT`` keeps the frames' first boundaries, the prompt's chunks and then one position at a time: the same
    bits on the same kind of machine, at the price of time.
    """

    FAST = "fast"
    EXACT = "exact"


@dataclass(frozen=True, slots=True)
class Retry:
    """Send the identical frame again; hops answer it from their last run."""

    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the node that would be blamed whether it is alive and busy, then decide again with `History.busy` set."""


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


Action = Retry | Probe | RePrefill | Reroute | Stateless | Fail


@dataclass(frozen=True, slots=True)
class History:
    """What was tried since the last token.

    Attributes:
        failures: errors since then, oldest first.
        excluded: nodes that routes leave out.
        retries: how often the frame that failed was sent again already.
        stateless: no cache is in use.
        busy: what the node to blame said when it was probed for this failure; None before it was.
        failing_s: seconds since the first of the failures.
        patience_s: for how long a mesh that lacks layers is waited for.
    """

    failures: tuple[MeshnetError, ...] = ()
    excluded: frozenset[str] = frozenset()
    retries: int = 0
    stateless: bool = False
    busy: bool | None = None
    failing_s: float = 0.0
    patience_s: float = 60.0


def next_action(failure: MeshnetError, node_id: str | None, history: History) -> Action:  # noqa: C901, PLR0911 - one return a row
    """Decide what follows ``failure``.

    Args:
        failure: what went wrong.
        node_id: the node that is to blame, where one is.
        history: what was tried before it; ``failure`` is not in it yet.
    """
    attempts = len(history.failures)
    if attempts >= MAX_ATTEMPTS:
        return Fail(_telling(failure, history))
    wait_s = min(MAX_BACKOFF_S, BACKOFF_S * 2**attempts)
    without = history.excluded | ({node_id} if node_id is not None else frozenset())
    reroute = Reroute(without, wait_s if attempts else 0.0)
    match failure:
        case (
            CacheMissError(reason=MissReason.MODEL_MISMATCH | MissReason.RANGE_MISMATCH)
            | DrainingError()
            | ProtocolMismatchError()
        ):
            # A node with other layers or another protocol than the route says, as after a restart, would say so again.
            return reroute
        case CacheMissError():
            return _after_miss(failure, history)
        case HopUnreachableError() | DeadlineError():
            return _again(failure, node_id, history) or reroute
        case BadFrameError() if history.retries < MAX_RETRIES:
            return Retry()
        case BadFrameError() | HopFailedError():
            if not any(isinstance(past, type(failure)) for past in history.failures):
                return RePrefill()
            return reroute if isinstance(failure, HopFailedError) else Fail(failure)
        case NoRoomError():
            return Fail(failure)
        case CacheFullError(never=True):
            return Fail(failure) if history.stateless else Stateless()
        case CacheFullError():
            return RePrefill()
        case LayersUnavailableError() | TrackerUnreachableError() if (
            history.failures and history.failing_s + wait_s < history.patience_s
        ):
            # Whoever was blamed may be back, and is better than nobody.
            return Reroute(frozenset(), wait_s)
        case _:
            return Fail(_telling(failure, history))


def _after_miss(failure: CacheMissError, history: History) -> Action:
    misses = sum(isinstance(past, CacheMissError) for past in history.failures) + 1
    if misses <= MISSES_BEFORE_STATELESS:
        return RePrefill()
    return Fail(failure) if history.stateless and misses > 2 * MISSES_BEFORE_STATELESS else Stateless()


def _again(failure: HopUnreachableError | DeadlineError, node_id: str | None, history: History) -> Retry | Probe | None:
    """Another try of the very frame, or the question whether it is worth one; None where it is not."""
    plain = MAX_RETRIES if isinstance(failure, HopUnreachableError) else 0
    if history.retries < plain:
        return Retry(BACKOFF_S * history.retries)
    if node_id is None or history.retries >= plain + BUSY_RETRIES or history.busy is False:
        return None
    return Probe() if history.busy is None else Retry(BACKOFF_S)


def _telling(failure: MeshnetError, history: History) -> MeshnetError:
    """Of all that failed in turn, what tells a client the most.

    Layers that nobody holds come before the hop whose death took them, and what a hop failed with before the want of a
    route that leaves it out.
    """
    causes = HopFailedError if isinstance(failure, LayersUnavailableError) else LayersUnavailableError
    if not isinstance(failure, LayersUnavailableError | HopUnreachableError | DeadlineError):
        return failure
    return next((past for past in reversed(history.failures) if isinstance(past, causes)), failure)
