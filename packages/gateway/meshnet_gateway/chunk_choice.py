"""Into which chunks a prefill is cut, and how many of them are under way at once, by what was measured. Pure.

    hop 1    [ chunk 1 ][ chunk 2 ][ chunk 3 ]
    link               [>]        [>]        [>]
    hop 2                [ chunk 1 ][ chunk 2 ][ chunk 3 ]

Short chunks let the hops work at once sooner; but each chunk costs every hop what does not depend on its length. Over
hops alike a prefill takes the sum of its chunks' times, and once more the longest of them: so they are to take equally
long, and as a position takes longer the more are before it, later ones are shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt

from meshnet_core.frames import MAX_CHUNK
from meshnet_gateway.prefill_cut import LEAST_IN_FLIGHT, MOST_IN_FLIGHT, PrefillCut
from meshnet_gateway.route_stages import Stage

CHUNK_STEP = 32  # no more chunks than there are of so many positions; those of one length are multiples of it
ROUND = 8  # others are multiples of this, but for the last: matrix products like round numbers
COUNTS = 16  # numbers of chunks that chunks of one time are tried with: a prefill's time lies flat around its best
MOST_CHUNKS = 256  # unless there must be more: one chunk of so many is little to wait for
NEAR = 0.002  # of a prefill's time, too little to have more chunks for


def choose_cut(stages: Sequence[Stage], positions: int, most: int = MAX_CHUNK, begin: int = 0) -> PrefillCut:
    """The cut whose prefill is done soonest; of several, or nearly so, the one with the fewest chunks.

    Args:
        stages: as `stages_of` gives them; with none, or a single one that takes time, chunks are as long as may be.
        positions: to prefill, at least 1.
        most: positions that a chunk may have.
        begin: positions before them that a held prefix has.
    """
    if sum(stage.busy_ms(1, begin) > 0 for stage in stages) < 2:
        return PrefillCut((most,))
    delay_ms = sum(stage.delay_ms for stage in stages)
    found: list[tuple[float, tuple[int, ...]]] = []
    soonest = float("inf")
    for count, length in sorted(_ways(positions, most)):
        slowest = max(stages, key=lambda stage: stage.prefill_ms(positions, count, begin))
        if slowest.prefill_ms(positions, count, begin) + delay_ms >= soonest:
            break  # nor are more chunks done sooner
        if length:
            lengths = (length,) * (count - 1) + (positions - (count - 1) * length,)
        else:
            lengths = equal_times(slowest, positions, count, most, begin)
        found.append((prefill_ms(stages, lengths, begin), lengths))
        soonest = min(soonest, found[-1][0])
    near = [(len(lengths), ms, lengths) for ms, lengths in found if ms <= soonest * (1 + NEAR)]
    _, _, lengths = min(near)
    return PrefillCut(lengths, _in_flight(stages, lengths[0], begin))


def prefill_ms(stages: Sequence[Stage], lengths: Sequence[int], begin: int = 0) -> float:
    """Milliseconds from the first chunk's departure until the last one has left the last stage."""
    left = [0.0] * len(lengths)  # when each chunk left the stage before
    on_way = 0.0
    for stage in stages:
        fixed, position, depth = stage.fixed_ms, stage.position_ms, stage.depth_ms
        on_way += stage.delay_ms
        if not fixed + position + depth:
            continue
        free, before = 0.0, begin
        for index, length in enumerate(lengths):
            comes = left[index] + on_way
            # As `Stage.busy_ms`, which would be called some ten thousand times for a long prompt.
            busy = fixed + length * (position + depth * (before + length / 2))
            free = left[index] = (max(free, comes)) + busy
            before += length
        on_way = 0.0
    return left[-1] + on_way


def equal_times(stage: Stage, positions: int, count: int, most: int, begin: int = 0) -> tuple[int, ...]:
    """Lengths of ``count`` chunks that keep ``stage`` busy equally long, but for rounding and where ``most`` is less.

    Args:
        stage: to be kept busy.
        positions: in all, from ``count`` to ``count`` times ``most``.
        count: of chunks, at least 1.
        most: positions that a chunk may have.
        begin: positions before them.
    """
    step = ROUND if most >= CHUNK_STEP else 1
    lengths: list[int] = []
    before, left = begin, positions
    for chunks in range(count, 1, -1):
        least = left - (chunks - 1) * most  # or there would be too much for the others
        wanted = max(round(_share(stage, left, chunks, before) / step), ceil(least / step), 1) * step
        lengths.append(min(wanted, most, left - (chunks - 1)))
        before += lengths[-1]
        left -= lengths[-1]
    return (*lengths, left)


def _share(stage: Stage, positions: int, chunks: int, before: int) -> float:
    """Positions of the first of so many chunks if all are to take equally long, as if they could be cut anywhere."""
    share_ms = (stage.busy_ms(positions, before) - stage.fixed_ms) / chunks
    position_ms = stage.position_ms + stage.depth_ms * before
    # Of depth/2 n^2 + position n = share, the n that is not negative, in the form that bears a depth of nothing.
    whole = position_ms + sqrt(position_ms**2 + 2 * stage.depth_ms * share_ms)
    return 2 * share_ms / whole if whole > 0 else positions / chunks


def _ways(positions: int, most: int) -> set[tuple[int, int]]:
    """Numbers of chunks to try, each with the length that they are to have, or 0 for one time."""
    fewest = ceil(positions / most)
    more = max(1.0, min(MOST_CHUNKS, positions // CHUNK_STEP) / fewest)
    ways = {(round(fewest * more ** (index / (COUNTS - 1))), 0) for index in range(COUNTS)}
    for length in (*range(CHUNK_STEP, min(most, positions), CHUNK_STEP), most):
        count = ceil(positions / length)
        if count <= max(fewest, MOST_CHUNKS):
            ways.add((count, length))
    return ways


def _in_flight(stages: Sequence[Stage], chunk: int, begin: int) -> int:
    """Enough that the first hop need not wait for the next chunk: one is asked for when the second hop has one."""
    if len(stages) < len(("way", "hop", "way", "hop")):
        return LEAST_IN_FLIGHT
    entry, first, link = stages[:3]
    away_ms = 2 * entry.delay_ms + 2 * link.delay_ms + link.busy_ms(chunk)
    return min(MOST_IN_FLIGHT, max(LEAST_IN_FLIGHT, 1 + ceil(away_ms / max(first.busy_ms(chunk, begin), 1e-6))))
