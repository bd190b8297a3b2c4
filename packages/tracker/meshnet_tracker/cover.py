"""The cover of a model by machines whose slowest part is fastest: which machine runs which layers.

A part is a machine's hop. A limit on the time of a part says how far each machine gets from a boundary
(`Machine.furthest`), never further from a lower one; so of the orders of the machines the one that gets furthest
counts, and the least limit under which some order covers the model is found by bisection. Pure.

- Up to `EXACT_MACHINES` machines: the furthest boundary for every subset of them, whatever the layers' sizes, cuts and
  fixed ranges are. Exact.
- More: the machines with the most layers first, and at the two ends, which are heavier, the ones that lose least by it.
  Exact where all layers are alike, may be cut anywhere and nothing is fixed; else close, for one layer more or less
  weighs little among many machines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from meshnet_core.layer_range import LayerRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from meshnet_core.model_facts import ModelFacts
    from meshnet_tracker.machine import Machine

EXACT_MACHINES = 8
FEWER_PARTS = 1.03  # the slowest part may be so much slower than need be, where that saves a hop
SAME_ORDER = 1.015  # and so much more, where the machines can then stay in their order
_PRECISION = 1e-3


@dataclass(frozen=True, slots=True)
class Part:
    """What one machine runs: ``[start, stop)``. A fixed machine may hold layers below ``start`` too."""

    machine: Machine
    start: int
    stop: int

    @property
    def layers(self) -> LayerRange:
        return LayerRange(self.start, self.stop)


Cover = list[Part]
"""Parts in order, each beginning where the one before it ends, from layer 0 to the last."""
Search = Callable[[float], Cover | None]
"""From a limit in milliseconds to a cover whose parts keep it, if one is found."""


def best_cover(machines: Sequence[Machine], facts: ModelFacts) -> Cover | None:
    """The cover whose slowest part is fastest, but for `FEWER_PARTS`; None where the machines cannot hold the model.

    Fixed machines run from where the part before ends to the end of what they hold. Deterministic: the order of
    ``machines`` decides between equals.
    """
    search = _search(machines, facts)
    found = _least_limit(search, facts)
    if found is None:
        return None
    fewest = search(slowest_ms(found, facts) * FEWER_PARTS)
    if fewest is not None and len(fewest) < len(found):
        found = _least_limit(_search([part.machine for part in fewest], facts), facts, fewest) or fewest
    return _in_their_order(found, facts)


def cover_within(machines: Sequence[Machine], facts: ModelFacts, limit_ms: float) -> Cover | None:
    """Some cover without a part slower than ``limit_ms``, by fixed machines before others; None if none is found."""
    return _search(machines, facts)(limit_ms)


def _search(machines: Sequence[Machine], facts: ModelFacts) -> Search:
    """What finds a cover within a limit, or None."""
    if len(machines) <= EXACT_MACHINES:
        return lambda limit_ms: _subsets(machines, facts, limit_ms)
    ranking = _Ranking(machines, facts)
    return lambda limit_ms: _largest_first(ranking, facts, limit_ms)


def _in_their_order(cover: Cover, facts: ModelFacts) -> Cover:
    """The same machines in the order in which they stand already, if that is as good: little has to be moved then."""
    if any(part.machine.fixed for part in cover):
        return cover
    standing = sorted((p.machine for p in cover if p.machine.held is not None), key=lambda m: (m.held, m.name))
    newcomers = [part.machine for part in cover if part.machine.held is None]
    order = [*standing, *newcomers]
    if not standing or [part.machine for part in cover] == order:
        return cover
    ordered = _least_limit(lambda limit: _line_up(order, facts, limit), facts)
    good = ordered is not None and slowest_ms(ordered, facts) <= slowest_ms(cover, facts) * SAME_ORDER
    return ordered if good and ordered is not None else cover


def _line_up(machines: Sequence[Machine], facts: ModelFacts, limit_ms: float) -> Cover | None:
    """Each machine from where the one before it ends."""
    parts: Cover = []
    at = 0
    for machine in machines:
        if at < facts.num_layers and (stop := machine.furthest(facts, at, limit_ms)) > at:
            parts.append(Part(machine, at, stop))
            at = stop
    return parts if at == facts.num_layers else None


def slowest_ms(cover: Cover, facts: ModelFacts) -> float:
    """Milliseconds of the slowest part of a decode step: the reciprocal is what the mesh may do at most."""
    return max(part.machine.time(facts, part.start, part.stop) for part in cover)


def _least_limit(search: Search, facts: ModelFacts, known: Cover | None = None) -> Cover | None:
    """Bisect the limit; what is found says the next upper bound itself, so that few steps do."""
    best = known or search(inf)
    if best is None:
        return None
    low, high = 0.0, slowest_ms(best, facts)
    while high - low > high * _PRECISION:
        middle = (low + high) / 2
        if (found := search(middle)) is None:
            low = middle
        else:
            best, high = found, min(middle, slowest_ms(found, facts))
    return best


def reach(machine: Machine, facts: ModelFacts, start: int, limit_ms: float) -> int:
    """How far a machine gets from ``start``; ``start`` itself if nowhere."""
    if not machine.fixed or machine.held is None:
        return machine.furthest(facts, start, limit_ms)
    stop = machine.held.stop
    runs = start in machine.held and machine.time(facts, start, stop) <= limit_ms * (1 + 1e-9)
    return stop if runs else start


def _subsets(machines: Sequence[Machine], facts: ModelFacts, limit_ms: float) -> Cover | None:
    """Exact. Of the subsets that cover the model one of the fewest machines, then the first."""
    get = lru_cache(maxsize=None)(lambda index, start: reach(machines[index], facts, start, limit_ms))
    count = len(machines)
    furthest = [0] * (1 << count)
    last = [0] * (1 << count)
    winner = 0
    for subset in range(1, 1 << count):
        best, by = -1, 0
        for index in range(count):
            if subset >> index & 1:
                stop = get(index, furthest[subset & ~(1 << index)])
                if stop > best:
                    best, by = stop, index
        furthest[subset], last[subset] = best, by
        covers = best == facts.num_layers
        if covers and (not winner or subset.bit_count() < winner.bit_count()):
            winner = subset
    parts: Cover = []
    while winner:
        index = last[winner]
        winner &= ~(1 << index)
        if furthest[winner] < (stop := get(index, furthest[winner])):
            parts.append(Part(machines[index], furthest[winner], stop))
    return parts[::-1] or None


class _Ranking:
    """Many machines by how many layers they can run within a limit, in the middle of the model and at its ends.

    Only an order: how far a machine really gets is `Machine.furthest`'s to say.
    """

    def __init__(self, machines: Sequence[Machine], facts: ModelFacts) -> None:
        self.free = [machine for machine in machines if not machine.fixed]
        self.fixed = [machine for machine in machines if machine.fixed]
        self._facts = facts
        self._elements = np.array([machine.memory // machine.width for machine in self.free], np.float64)
        self._layer_ms = np.array([machine.layer_ms for machine in self.free])
        self._hop_ms = np.array([machine.hop_ms for machine in self.free])
        self._layer = max(1e-9, facts.sums[-1] / facts.num_layers)  # elements of an average layer

    def alone(self, limit_ms: float) -> Machine | None:
        """The fastest of those that run the whole model within the limit."""
        facts = self._facts
        ms = self._hop_ms + self._layer_ms * (facts.num_layers + facts.head_layers)
        ms[self._elements < facts.elements(0, facts.num_layers)] = inf
        if not len(ms) or not ms[at := int(np.argmin(ms))] < min(inf, limit_ms * (1 + 1e-9)):
            return None
        return self.free[at]

    def layers(self, limit_ms: float) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """How many average layers each free machine runs in the middle, from layer 0, and up to the model's end."""
        facts, most = self._facts, float(self._facts.num_layers)
        time = np.full(len(self.free), most)
        if limit_ms < inf:
            time = (limit_ms * (1 + 1e-9) - self._hop_ms) / self._layer_ms
        middle, head, tail = (
            np.clip(np.floor(np.minimum(by_time, elements / self._layer)), 0, most)
            for by_time, elements in (
                (time, self._elements),
                (time, self._elements - facts.embedding),
                (time - facts.head_layers, self._elements - facts.head),
            )
        )
        return middle, head, tail


def _largest_first(ranking: _Ranking, facts: ModelFacts, limit_ms: float) -> Cover | None:
    if (alone := ranking.alone(limit_ms)) is not None:
        return [Part(alone, 0, facts.num_layers)]
    middle, head, tail = ranking.layers(limit_ms)
    order = np.argsort(-middle, kind="stable")[: facts.num_layers + 4]
    inner = {ranking.free[index].name: int(middle[index]) for index in order}
    # The two that lose fewest layers by standing at an end: one of them is there if the other is at the other.
    heads, tails = (
        [ranking.free[index] for index in np.argsort(np.where(able > 0, middle - able, inf), kind="stable")[:2]]
        for able in (head, tail)
    )
    free = [ranking.free[index] for index in order]
    found: list[Cover] = []
    for first in [*heads, None]:
        for last in [*tails, None]:
            if first is None or first is not last:
                cover = _walk(free, ranking.fixed, first, last, inner, facts, limit_ms)
                found += [cover] if cover is not None else []
    return min(found, key=len, default=None)


def _latest_start(machine: Machine, facts: ModelFacts, limit_ms: float) -> int:
    """The lowest boundary from which it runs to the model's end; the number of layers if from none."""
    boundaries = facts.boundaries
    low, high = 0, len(boundaries) - 1
    while low < high:
        at = (low + high) // 2
        if machine.furthest(facts, boundaries[at], limit_ms) == facts.num_layers:
            high = at
        else:
            low = at + 1
    return boundaries[low]


def _walk(
    free: list[Machine],
    fixed: list[Machine],
    head: Machine | None,
    tail: Machine | None,
    inner: dict[str, int],
    facts: ModelFacts,
    limit_ms: float,
) -> Cover | None:
    """From layer 0 up: a fixed machine where one holds the layer, else the largest that is left, and the tail last."""
    total = facts.num_layers
    finish = total if tail is None else _latest_start(tail, facts, limit_ms)
    rest = [machine for machine in free if machine is not head and machine is not tail]
    rest.reverse()  # the largest is taken from the end
    parts: Cover = []
    at = 0
    while at < total:
        standing = [(stop, m) for m in fixed if (stop := reach(m, facts, at, limit_ms)) > at]
        if standing:
            stop, machine = max(standing, key=lambda pair: pair[0])
        elif at == 0 and head is not None:
            machine = head
            stop = head.furthest(facts, 0, limit_ms)
        elif tail is not None and at >= finish:
            machine, stop = tail, total
        elif rest:
            following = min((m.held.start for m in fixed if m.held and m.held.start > at), default=total)
            machine = _take(rest, following - at, inner) if fixed else rest.pop()
            stop = machine.furthest(facts, at, limit_ms)
        else:
            return None
        if stop <= at:
            return None
        parts.append(Part(machine, at, stop))
        at = stop
    return parts


def _take(rest: list[Machine], needed: int, inner: dict[str, int]) -> Machine:
    """The smallest that closes the gap, else the largest."""
    for index, machine in enumerate(rest):
        if inner[machine.name] >= needed:
            return rest.pop(index)
    return rest.pop()
