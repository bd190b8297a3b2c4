"""How many requests a peer may make: a token bucket for each. Pure but for the clock it is given."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from meshnet_core.clock import Clock
from meshnet_core.errors import InvalidInputError

MAX_PEERS = 10_000


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float


class PeerRates:
    """Token buckets by peer: ``burst`` requests at once, ``per_s`` a second on the long run.

    The peers that were not heard of for longest are forgotten beyond ``max_peers``; theirs would be full again anyway,
    unless that many make requests within one burst's time.
    """

    def __init__(self, clock: Clock, per_s: float, burst: float, *, max_peers: int = MAX_PEERS) -> None:
        if not 0 < per_s < float("inf") or not 1 <= burst < float("inf") or max_peers < 1:
            raise InvalidInputError(f"a rate must be above 0 and a burst at least 1, not {per_s!r} and {burst!r}")
        self._clock = clock
        self._per_s = per_s
        self._burst = burst
        self._max_peers = max_peers
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, peer: str) -> float:
        """Take one request of ``peer``'s: 0.0 where it may make it, else the seconds until it may."""
        now = self._clock.now()
        bucket = self._buckets.pop(peer, None) or _Bucket(self._burst, now)
        self._buckets[peer] = bucket
        while len(self._buckets) > self._max_peers:
            self._buckets.popitem(last=False)
        bucket.tokens = min(self._burst, bucket.tokens + (now - bucket.at) * self._per_s)
        bucket.at = now
        if bucket.tokens < 1.0:
            return (1.0 - bucket.tokens) / self._per_s
        bucket.tokens -= 1.0
        return 0.0
