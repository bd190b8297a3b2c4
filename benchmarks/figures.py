"""The arithmetic of the benchmarks: times of tokens in, speeds, windows and ratios out. Pure; measures nothing.

    token      0        1        2   ...        50  ...
    time    ttft  ttft+step   ...
               └───────── first window: 50 steps ─┘

A speed is steps by time, so the first token, which carries the prefill, is in none. Windows are runs of 50 steps from
the first token on; the last window is the newest 50 steps, whether or not the number of tokens divides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

WINDOW = 50  # steps


@dataclass(frozen=True, slots=True)
class Spread:
    """Median of several repeats, and their least and greatest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value; raises `ValueError` for none."""
        found = sorted(values)
        if not found:
            raise ValueError("a median needs at least one value")
        return cls(statistics.median(found), found[0], found[-1])

    def to_json(self) -> dict[str, float]:
        return {key: round(value, 6) for key, value in asdict(self).items()}

    def shown(self, digits: int = 2) -> str:
        """``1.02 (0.98-1.05)``; without the parentheses where all values are one."""
        middle = f"{self.median:.{digits}f}"
        return middle if self.low == self.high else f"{middle} ({self.low:.{digits}f}-{self.high:.{digits}f})"


@dataclass(frozen=True, slots=True)
class Interval:
    """A median, and between what it lies with at least this confidence, whatever the distribution.

    The ends are repeats, counted from the outermost ones inwards as far as the confidence allows: the median of what
    was drawn from lies between the k-th least and the k-th greatest of n unless fewer than k of n fair coins fall on
    one side. H. A. David and H. N. Nagaraja, "Order Statistics", section 7.1. Few repeats do not reach the confidence
    that is asked, and say so: three give 0.75, six 0.97.

    Attributes:
        confidence: that the interval has.
        repeats: that it was made of.
    """

    median: float
    low: float
    high: float
    confidence: float
    repeats: int

    @classmethod
    def of(cls, values: Iterable[float], asked: float = 0.95) -> Interval:
        """Of at least one value; raises `ValueError` for none."""
        found = sorted(values)
        if not found:
            raise ValueError("an interval needs at least one value")
        k = 1
        while 2 * (k + 1) <= len(found) and _confidence(len(found), k + 1) >= asked:
            k += 1
        return cls(statistics.median(found), found[k - 1], found[-k], _confidence(len(found), k), len(found))

    def at_least(self, target: float) -> bool:
        """Whether it reaches ``target`` from below: what is measured may be as much."""
        return self.high >= target

    def at_most(self, target: float) -> bool:
        """Whether it reaches ``target`` from above: what is measured may be as little."""
        return self.low <= target

    def to_json(self) -> dict[str, float]:
        return {key: round(value, 6) for key, value in asdict(self).items()}

    def shown(self, digits: int = 2) -> str:
        """``0.58 (0.55 to 0.61 at 0.97)``."""
        low, high = f"{self.low:.{digits}f}", f"{self.high:.{digits}f}"
        return f"{self.median:.{digits}f} ({low} to {high} at {self.confidence:.2f})"

    def brief(self, digits: int = 2) -> str:
        """``0.58 (0.55-0.61)``, for a table that tells the confidence once."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """When each token of one answer came, in seconds from the request on.

    Raises:
        ValueError: for less than two tokens, or times that run backwards.
    """

    times: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.times) < 2:
            raise ValueError(f"a speed needs at least two tokens, not {len(self.times)}")
        if any(later < earlier for earlier, later in zip(self.times, self.times[1:], strict=False)):
            raise ValueError("times of tokens run backwards")

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.times[0]

    @property
    def tokens_per_s(self) -> float:
        """Decode speed over the whole answer; the first token and its prefill are left out."""
        return rate(self.times)

    @property
    def first_window(self) -> float:
        """Tokens per second of the first `WINDOW` steps, or of all where there are fewer."""
        return rate(self.times[: WINDOW + 1])

    @property
    def last_window(self) -> float:
        """Tokens per second of the last `WINDOW` steps, or of all where there are fewer."""
        return rate(self.times[-WINDOW - 1 :])

    @property
    def retention(self) -> float:
        """What is left of the first window's speed in the last one."""
        return self.last_window / self.first_window

    def windows(self) -> list[float]:
        """Tokens per second of each whole window, from the first token on."""
        starts = range(0, len(self.times) - WINDOW, WINDOW)
        return [rate(self.times[at : at + WINDOW + 1]) for at in starts]

    def to_json(self) -> dict[str, Any]:
        return {
            "ttft_s": round(self.ttft_s, 4),
            "tokens_per_s": round(self.tokens_per_s, 3),
            "first_window": round(self.first_window, 3),
            "last_window": round(self.last_window, 3),
            "retention": round(self.retention, 4),
            "windows": [round(value, 3) for value in self.windows()],
        }


def mean_batch(before: Mapping[int, int], after: Mapping[int, int]) -> float:
    """Frames by forward between two counts of frames in one forward -> how often; 0 where none ran."""
    ran = {frames: count - before.get(frames, 0) for frames, count in after.items()}
    forwards = sum(ran.values())
    return sum(frames * count for frames, count in ran.items()) / forwards if forwards else 0.0


def speed_between(times: Iterable[float], start: float, stop: float) -> float:
    """Tokens per second between two moments, from when each token came."""
    return sum(start <= at < stop for at in times) / (stop - start)


def rate(times: Sequence[float]) -> float:
    """Steps per second between the first and the last of ``times``, seconds."""
    return (len(times) - 1) / max(times[-1] - times[0], 1e-9)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Ours by theirs, within each repeat, and only then the median: what slows a whole repeat down cancels out.

    Raises:
        ValueError: if the repeats do not pair up.
    """
    return Spread.of(paired(ours, theirs))


def paired(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ours by theirs, within each repeat.

    Raises:
        ValueError: if the repeats do not pair up.
    """
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two answers have in common from the start."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def _confidence(repeats: int, k: int) -> float:
    """That the median lies between the ``k``-th least and the ``k``-th greatest of ``repeats``."""
    return 1 - 2 * sum(math.comb(repeats, heads) for heads in range(k)) / 2**repeats
