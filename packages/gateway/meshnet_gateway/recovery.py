"""What to do after a failure, as a pure decision. It sees the error and what was tried; it moves nothing.

failure                              first           then                     in the end
cache miss                           re-prefill      re-prefill               stateless
other model, layers, protocol there   reroute without the hop                  fail
hop unreachable                      retry           probe, as below          fail
deadline                             probe           as below                 fail
  the probe: gone                    reroute without it, which is blamed
  busy                               retry once      reroute without it
  idle                               reroute without it; the second time that the same hop reports one that answers us:
                                     without the reporter, which is blamed, and with those that it reported
draining                             reroute without the hop                  fail
no room (429), of a frame            re-prefill, once there is room           fail
no room, ever                        stateless                                fail
no room, after waiting for it        fail: `waiting_room` has had its say
exception in a forward               re-prefill      reroute without it       fail
no route, once others were blamed    wait, with the blamed let in again, for  fail, with the layers that lack
                                     as long as a step may take
  before the session was ever open   the same, but only while there is        fail, as for a request that comes now
                                     somebody blamed to let in again
bad frame (cut on its way?)          retry           re-prefill, 3 times      fail
too large, ...                       fail: the same would happen again

A probe tells *queued* from *hung*: a hop that answers it and has frames to run is busy, and leaving it would only move
the load elsewhere together with a prefill. One that answers and has nothing to do was not reached by the hop before it,
which may be either's fault: nobody else need leave it out.

misses without end                   stateless; with a cache again after 32 tokens, then 64, 128, ...
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

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

MAX_ATTEMPTS = 12  # failures in a row without a token between them, those of waiting for layers left out
MAX_RETRIES = 2  # of one frame: a route has more than one connection that can break
BUSY_RETRIES = 1  # of one frame more, where the hop to blame says that it is busy
MISSES_BEFORE_STATELESS = 3
BAD_FRAMES_BEFORE_FAIL = 3  # re-prefills: where one frame in many is cut, a prompt of many chunks may meet it twice
STATELESS_TOKENS = 32  # before a cache is tried again; twice as many each time that it was in vain
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


class Probed(enum.Enum):
    """What the node to blame said when it was asked."""

    GONE = enum.auto()  # nothing
    IDLE = enum.auto()
    BUSY = enum.auto()  # frames wait or run there


@dataclass(frozen=True, slots=True)
class Retry:
    """Send the identical frame again; hops answer it from their last run."""

    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the node that would be blamed whether it is alive and busy, then decide again with `History.probed` set."""


@dataclass(frozen=True, slots=True)
class RePrefill:
    """Prefill prompt and answer so far again, on the same route, under a new epoch."""

    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reroute:
    """Ask for a route without the nodes named, and prefill there under a new epoch.

    Attributes:
        excluded: nodes to leave out from now on, those of before included.
        wait_s: before that.
        blamed: of them the one that other generations had better leave out too.
        doubt: who reported whom, though that one answers us.
    """

    excluded: frozenset[str]
    wait_s: float = 0.0
    blamed: str | None = None
    doubt: tuple[str, str] | None = None


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
        probed: what the node to blame said when it was probed for this failure; None before it was.
        doubts: (reporter, reported) of this generation, each a node that another could not reach though we could.
        lacking_s: seconds since layers were found to lack; None while a route has all of them.
        patience_s: for how long they are waited for.
        begun: the session was open on some route; whoever asked has begun to get an answer.
    """

    failures: tuple[MeshnetError, ...] = ()
    excluded: frozenset[str] = frozenset()
    retries: int = 0
    stateless: bool = False
    probed: Probed | None = None
    doubts: frozenset[tuple[str, str]] = frozenset()
    lacking_s: float | None = None
    patience_s: float = 60.0
    begun: bool = True


def next_action(  # noqa: C901, PLR0911 - one return a row
    failure: MeshnetError, node_id: str | None, history: History, reporter: str | None = None
) -> Action:
    """Decide what follows ``failure``.

    Args:
        failure: what went wrong.
        node_id: the node that is to blame, where one is.
        history: what was tried before it; ``failure`` is not in it yet.
        reporter: the node that could not reach it; None where we could not.
    """
    attempts = len(history.failures)
    lacking_s = history.lacking_s
    if attempts >= MAX_ATTEMPTS if lacking_s is None else lacking_s >= history.patience_s:
        return Fail(_telling(failure, history))
    wait_s = min(MAX_BACKOFF_S, BACKOFF_S * 2 ** min(attempts, MAX_ATTEMPTS))
    blamed = None if isinstance(failure, DrainingError) else node_id
    reroute = Reroute(history.excluded | _named(node_id), wait_s if attempts else 0.0, blamed)
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
            return _again(failure, node_id, history) or _without_who_is_at_fault(node_id, history, reroute, reporter)
        case BadFrameError() if history.retries < MAX_RETRIES:
            return Retry()
        case BadFrameError():
            return (
                RePrefill(wait_s if attempts else 0.0)
                if _times(BadFrameError, history) < BAD_FRAMES_BEFORE_FAIL
                else Fail(failure)
            )
        case HopFailedError():
            return reroute if _times(HopFailedError, history) else RePrefill()
        case NoRoomError():
            return Fail(failure)
        case CacheFullError(never=True):
            return Fail(failure) if history.stateless else Stateless()
        case CacheFullError():
            return RePrefill()
        case LayersUnavailableError() | TrackerUnreachableError() if (
            history.failures
            and (history.begun or history.excluded or isinstance(failure, TrackerUnreachableError))
            and (lacking_s or 0.0) + wait_s < history.patience_s
        ):
            # Whoever was blamed may be back, and is better than nobody.
            return Reroute(frozenset(), wait_s)
        case _:
            return Fail(_telling(failure, history))


def _after_miss(failure: CacheMissError, history: History) -> Action:
    misses = _times(CacheMissError, history) + 1
    if misses <= MISSES_BEFORE_STATELESS:
        return RePrefill()
    return Fail(failure) if history.stateless and misses > 2 * MISSES_BEFORE_STATELESS else Stateless()


def _times(kind: type[MeshnetError], history: History) -> int:
    return sum(isinstance(past, kind) for past in history.failures)


def _again(failure: HopUnreachableError | DeadlineError, node_id: str | None, history: History) -> Retry | Probe | None:
    """Another try of the very frame, or the question whether it is worth one; None where it is not."""
    plain = MAX_RETRIES if isinstance(failure, HopUnreachableError) else 0
    if history.retries < plain:
        return Retry(BACKOFF_S * history.retries)
    if node_id is not None and history.probed is None:
        return Probe()
    busy = history.probed is Probed.BUSY and history.retries < plain + BUSY_RETRIES
    return Retry(BACKOFF_S) if busy else None


def _without_who_is_at_fault(node_id: str | None, history: History, reroute: Reroute, reporter: str | None) -> Reroute:
    """Another route, once a node was probed that could not be reached, or not in time."""
    if node_id is None or history.probed is Probed.GONE:
        return reroute
    if history.probed is Probed.BUSY or reporter is None:
        return replace(reroute, blamed=None)
    reported = frozenset(node for other, node in history.doubts if other == reporter)
    if not reported:
        return replace(reroute, blamed=None, doubt=(reporter, node_id))
    return replace(reroute, excluded=(history.excluded - reported) | {reporter}, blamed=reporter)


def tries_cache_again(tokens: int, returns: int) -> bool:
    """Whether a session without state had better try a cache again.

    Args:
        tokens: how many it made without.
        returns: how often it tried before. What made it miss may last: each time in vain costs prefills, and the wait
            doubles, so that all of them together stay a small share.
    """
    return tokens >= STATELESS_TOKENS << returns


def _named(node_id: str | None) -> frozenset[str]:
    return frozenset() if node_id is None else frozenset({node_id})


def _telling(failure: MeshnetError, history: History) -> MeshnetError:
    """Of all that failed in turn, what tells a client the most.

    Layers that nobody holds come before the hop whose death took them, and what a hop failed with before the want of a
    route that leaves it out.
    """
    causes = HopFailedError if isinstance(failure, LayersUnavailableError) else LayersUnavailableError
    if not isinstance(failure, LayersUnavailableError | HopUnreachableError | DeadlineError):
        return failure
    return next((past for past in reversed(history.failures) if isinstance(past, causes)), failure)
