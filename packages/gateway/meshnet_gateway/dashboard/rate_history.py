"""Tokens per second over time, from a count that grows. Bounded; the time is the caller's."""

from __future__ import annotations

from collections import deque

SAMPLES = 300  # at one a second, five minutes


class RateHistory:
    """The newest rates, at most ``samples`` of them."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self._rates: deque[tuple[float, float]] = deque(maxlen=samples)
        self._last: tuple[float, int] | None = None

    def add(self, now: float, total: int) -> None:
        """The count was ``total`` at ``now``, in seconds; a count that fell began anew."""
        if self._last is not None:
            at, before = self._last
            if now <= at:
                return
            made = total - before if total >= before else total
            self._rates.append((now, made / (now - at)))
        self._last = (now, total)

    def points(self, now: float) -> list[tuple[float, float]]:
        """(seconds before ``now`` as a number below zero, tokens per second), oldest first."""
        return [(round(at - now, 1), round(rate, 2)) for at, rate in self._rates]

    @property
    def newest(self) -> float:
        """Tokens per second of the newest two seconds or so."""
        newest = [rate for _, rate in self._rates][-2:]
        return sum(newest) / len(newest) if newest else 0.0
