"""What measuring tells of a quantity that changes: a running mean, how far single samples stray, how sure it is.

Pure but for the samples it has taken in; whoever adds one brings the time. Knows no unit and no node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from meshnet_core.errors import InvalidInputError
from meshnet_core.wire_fields import MAX_WHOLE

MAX_VARIANCE = 1e18
MAX_AGE_S = 1e9

WEIGHT = 0.1  # of a new sample
REMEMBERED = 2 / WEIGHT - 1  # samples whose plain mean would be as sure as one with that weight
STRAYS = 4  # samples in a row that stray to one side before a mean begins anew with them
STRAY_SD = 3.0  # standard deviations from the mean that make a sample a stray one
STRAY_SHARE = 0.25  # and the least share of the mean, since few samples may lie closer together than they will


@dataclass(frozen=True, slots=True)
class Evidence:
    """What stands behind a mean.

    Attributes:
        variance: of single samples about it, in the square of its unit.
        count: samples taken in since it last began anew.
        age_s: seconds since the last one.
    """

    variance: float = 0.0
    count: int = 1
    age_s: float = 0.0

    @property
    def sd(self) -> float:
        """How far a single sample strays, in the mean's unit."""
        return math.sqrt(self.variance)

    @property
    def standard_error(self) -> float:
        """How far the mean itself may be off, in its unit."""
        return math.sqrt(self.variance / (min(REMEMBERED, self.count)))

    def to_wire(self) -> list[float]:
        return [self.variance, self.count, self.age_s]

    @classmethod
    def from_wire(cls, document: object) -> Evidence:
        """Read :meth:`to_wire`'s form.

        Raises:
            InvalidInputError: it is anything else.
        """
        if isinstance(document, list) and len(document) == 3:
            variance, count, age_s = document
            if (
                _is_number(variance, MAX_VARIANCE)
                and _is_number(age_s, MAX_AGE_S)
                and isinstance(count, int)
                and not isinstance(count, bool)
                and 1 <= count <= MAX_WHOLE
            ):
                return cls(float(variance), count, float(age_s))
        raise InvalidInputError(
            f"what stands behind a mean is [variance, samples, seconds since the last], not {repr(document)[:80]}"
        )

    @classmethod
    def optional_from_wire(cls, document: object) -> Evidence | None:
        """The same; None for null, as older nodes tell nothing."""
        return None if document is None else cls.from_wire(document)


@dataclass(slots=True)
class RunningEstimate:
    """Exponentially weighted mean and variance of a measurement; None until the first.

    The first samples weigh 1/n each, so that the first one of all, slow as first ones are, is soon forgotten. Samples
    that stray far to one side, `STRAYS` of them in a row, are no noise but another regime, such as a machine that began
    to do something else: the mean begins anew with them. Method of the weighted variance: T. Finch, "Incremental
    calculation of weighted mean and variance", 2009, section 9.
    """

    weight: float = WEIGHT
    value: float | None = None
    variance: float = 0.0
    count: int = 0
    last_at: float = 0.0
    _strays: list[float] = field(default_factory=list)  # of one side, newest last

    def add(self, sample: float, now: float = 0.0) -> bool:
        """Take in a sample, at ``now`` seconds of the caller's clock; returns whether the mean began anew with it."""
        self.last_at = now
        bound = self._bound()
        if self.value is None or abs(sample - self.value) <= bound:
            self._strays.clear()
            self._take_in(sample)
            return False
        if self._strays and (self._strays[-1] > self.value) != (sample > self.value):
            self._strays.clear()
        self._strays.append(sample)
        if len(self._strays) < STRAYS:
            self._take_in(self.value + math.copysign(bound, sample - self.value))  # one alone counts for less
            return False
        self.value, self.variance, self.count = None, 0.0, 0
        for stray in self._strays:
            self._take_in(stray)
        self._strays.clear()
        return True

    def rescale(self, factor: float) -> None:
        """Expect ``factor`` times what was measured, since something that it goes with changed by so much."""
        if self.value is not None:
            self.value *= factor
            self.variance *= factor * factor
            self._strays.clear()

    def evidence(self, now: float | None = None) -> Evidence | None:
        """What stands behind `value` at ``now``, or right after its last sample; None where there is none."""
        if self.value is None:
            return None
        age_s = 0.0 if now is None else min(MAX_AGE_S, max(0.0, now - self.last_at))
        return Evidence(min(self.variance, MAX_VARIANCE), self.count, age_s)

    def _bound(self) -> float:
        """How far from the mean a sample is a stray one."""
        if self.value is None or self.count < 2:
            return math.inf
        return max(STRAY_SD * math.sqrt(self.variance), STRAY_SHARE * self.value)

    def _take_in(self, sample: float) -> None:
        self.count += 1
        weight = max(self.weight, 1 / self.count)
        before = 0.0 if self.value is None else self.value
        off = sample - before
        self.value = before + weight * off
        self.variance = 0.0 if self.count == 1 else (1 - weight) * (self.variance + weight * off * off)


def _is_number(value: object, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most
