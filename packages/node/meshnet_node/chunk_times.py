"""What chunks of prefills cost a shard: a running fit of how long they took, by their length and place. Pure.

    milliseconds of a layer = fixed + position x n + depth x n x (before + n/2)

for n positions with ``before`` positions before them. Least squares of relative errors that forget: what was measured
lately counts most, and a long chunk no more than a short one. Lengths that are all alike, or times that are, cannot
tell the three apart, so each is also held, weakly, to what is expected of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress, product

from meshnet_core.chunk_costs import ChunkCosts

FORGETTING = 0.97  # weight that a sample keeps with each one after it: some thirty chunks are remembered
NOISE = 0.05  # how far times stray, as a share of them; what is expected of a cost may be off by as much as the cost
FIXED_STEPS = 0.5  # decode steps that a chunk is expected to cost whatever its length
FIXED_POSITIONS = 8  # and positions, where no step was measured
DEPTH_POSITIONS = 1000  # positions before it that may cost a position as much as all else does
STRAY = 2.0  # times longer, or shorter, than expected is a stray one
SURE = 4  # samples that say what is a stray one, and strays in a row that say that the shard became another
LEAST_MS = 1e-6  # shorter is no measurement, and its square would be nothing

Sample = tuple[tuple[float, float, float], float]  # what the costs are times, and milliseconds


@dataclass(slots=True)
class ChunkTimes:
    """Of one shard, in milliseconds of each layer.

    A chunk that takes far longer or shorter than expected counts for less; several in a row, to one side, are no noise
    but another regime, and the fit begins anew with them.
    """

    _count: int = 0
    _squares: list[list[float]] = field(default_factory=lambda: [[0.0] * 3 for _ in range(3)])
    _products: list[float] = field(default_factory=lambda: [0.0] * 3)
    _strays: list[Sample] = field(default_factory=list)  # in a row, to one side
    _strays_long: bool = False

    def add(self, positions: int, before: int, ms: float, decode_ms: float | None = None) -> None:
        """Take in that a chunk took ``ms`` milliseconds of each layer.

        Args:
            positions: of the chunk, at least 1.
            before: positions before it.
            ms: those below a nanosecond are passed over.
            decode_ms: milliseconds of each layer for a decode step, if known.
        """
        if ms < LEAST_MS:
            return
        terms = (1.0, float(positions), positions * (before + positions / 2))
        costs = self.costs(decode_ms) if self._count >= SURE else None
        if costs is None:
            self._take_in(terms, ms, ms)
            return
        expected = max(costs.chunk_ms(positions, before), LEAST_MS)
        usual = min(max(ms, expected / STRAY), expected * STRAY)
        is_long = ms > expected
        if usual == ms or is_long != self._strays_long:
            self._strays.clear()
        if usual != ms:
            self._strays_long = is_long
            self._strays.append((terms, ms))
        if len(self._strays) < SURE:
            self._take_in(terms, usual, max(usual, expected))
            return
        anew = ChunkTimes()
        for stray_terms, stray_ms in self._strays:
            anew._take_in(stray_terms, stray_ms, stray_ms)
        self._count, self._squares, self._products = anew._count, anew._squares, anew._products
        self._strays.clear()

    def rescale(self, factor: float) -> None:
        """Expect ``factor`` times what was measured, since something that it goes with changed by so much."""
        self._products = [value / factor for value in self._products]
        self._squares = [[value / factor**2 for value in row] for row in self._squares]
        self._strays.clear()

    def costs(self, decode_ms: float | None = None) -> ChunkCosts | None:
        """What chunks cost, none of it negative; None before the first one."""
        if not self._count:
            return None
        expected = self._expected(decode_ms)
        scale = (*expected, expected[1] / DEPTH_POSITIONS)
        # In units of what may be expected: the three are of one size, and each is held to 1, 1 and 0, give or take 1.
        matrix = [
            [scale[i] * scale[j] * value / NOISE**2 for j, value in enumerate(row)]
            for i, row in enumerate(self._squares)
        ]
        for i, row in enumerate(matrix):
            row[i] += 1.0
        held = (1.0, 1.0, 0.0)
        right = [held[i] + scale[i] * value / NOISE**2 for i, value in enumerate(self._products)]
        fixed, position, depth = (share * unit for share, unit in zip(_least(matrix, right), scale, strict=True))
        return ChunkCosts(fixed, position, depth)

    def _take_in(self, terms: tuple[float, float, float], ms: float, scale_ms: float) -> None:
        """Take in a sample whose errors count by ``scale_ms``: its time, or what is expected, where that is longer."""
        self._count += 1
        shares = [term / scale_ms for term in terms]
        for i, share in enumerate(shares):
            self._products[i] = FORGETTING * self._products[i] + share * ms / scale_ms
            for j, other in enumerate(shares):
                self._squares[i][j] = FORGETTING * self._squares[i][j] + share * other

    def _expected(self, decode_ms: float | None) -> tuple[float, float]:
        """A chunk's fixed cost and a position's, if the samples told nothing but what a position takes all in all."""
        all_in = self._products[1] / self._squares[1][1]
        fixed = FIXED_POSITIONS * all_in if decode_ms is None else FIXED_STEPS * decode_ms
        beside_it = all_in - fixed * self._squares[0][1] / self._squares[1][1]
        position = max(beside_it, all_in / 2)  # the samples may say that so much cannot be fixed
        return max(fixed, position), position


def _least(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Where x'Mx - 2r'x is least of all x without a negative entry, for a positive definite M.

    Some entries are zero there and the others solve their own equations, so each set of entries is tried.
    """
    best, found = 0.0, [0.0] * len(right)
    for free in product((True, False), repeat=len(right)):
        part = [list(compress(row, free)) for row in compress(matrix, free)]
        solved = iter(_solved(part, list(compress(right, free))))
        entries = [next(solved) if is_free else 0.0 for is_free in free]
        gain = sum(entry * value for entry, value in zip(entries, right, strict=True))
        if min(entries) >= 0 and gain > best:
            best, found = gain, entries
    return found


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """The x of Mx = r by elimination; M is positive definite, so no pivot is zero. Both are used up."""
    for i, row in enumerate(matrix):
        for j in range(i + 1, len(matrix)):
            share = matrix[j][i] / row[i]
            matrix[j] = [value - share * above for value, above in zip(matrix[j], row, strict=True)]
            right[j] -= share * right[i]
    for i in reversed(range(len(matrix))):
        known = sum(matrix[i][j] * right[j] for j in range(i + 1, len(matrix)))
        right[i] = (right[i] - known) / matrix[i][i]
    return right
