"""Which of equals serves, and now and then somebody who is not known well enough: from one number in [0, 1). Pure.

draw   0 ──── 0.05 ─────────────────────────────────── 1
       explore │ each mean leans to the fast or the slow end of what it may be, by draw and node
"""

from __future__ import annotations

import random
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshnet_core.coverage import Offer

EXPLORE_ONE_IN = 20
EXPLORE_SHARE = 1 / EXPLORE_ONE_IN  # of draws, at most; what users pay for knowing the nodes that do not serve
KNOWN_SAMPLES = 16  # fewer say little of a mean
STALE_S = 60.0  # what was measured so long ago is worth looking at again twice as much
MOST_STALE = 10.0

_MASK = 2**64 - 1
_STRIDE = 7  # has no divisor in common with EXPLORE_ONE_IN, so that strata come in turns but not in order
_MODELS = 256


class RouteDraws:
    """The draws of one planner: each in its own stratum of `EXPLORE_ONE_IN`, so that exactly one in so many explores.

    With independent draws that share would be right only in the mean, and twenty generations in a row might pass, or
    three explore.

    Args:
        seed: of where within its stratum a draw lies.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)  # noqa: S311 - chooses among equals, guards nothing
        self._drawn: OrderedDict[str, int] = OrderedDict()  # by model, the one asked for last at the end

    def next(self, model: str, *, explore: bool = True) -> float:
        """The next draw for routes of ``model``, in [0, 1); the first that explores is the twentieth.

        One that must not explore is none of those that are counted.
        """
        if not explore:
            return EXPLORE_SHARE + (1 - EXPLORE_SHARE) * self._random.random()
        drawn = self._drawn.pop(model, 0) + 1
        self._drawn[model] = drawn
        if len(self._drawn) > _MODELS:
            self._drawn.popitem(last=False)
        return (drawn * _STRIDE % EXPLORE_ONE_IN + self._random.random()) / EXPLORE_ONE_IN


def explores(draw: float) -> bool:
    """Whether a draw goes to somebody who would not be chosen."""
    return draw < EXPLORE_SHARE


def lean_of(draw: float, node_id: str) -> float:
    """From -1 to 1, uniform over draws and independent between nodes; the finaliser of splitmix64."""
    z = (int(draw * 2**53) * 0x9E3779B97F4A7C15 + zlib.crc32(node_id.encode()) * 0xD1342543DE82EF95) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) / 2**63 - 1


def target_of(draw: float, offers: Iterable[Offer]) -> Offer | None:
    """Whom an exploring draw tries: anybody of ``offers``, the less is known of them the more likely.

    Args:
        draw: below `EXPLORE_SHARE`.
        offers: shards that are not chosen, in an order that does not depend on the snapshot's.
    """
    weighed = [(offer, _curiosity(offer)) for offer in offers]
    if not weighed:
        return None
    at = draw / EXPLORE_SHARE * sum(weight for _, weight in weighed)
    for offer, weight in weighed:
        at -= weight
        if at < 0:
            return offer
    return weighed[-1][0]


def _curiosity(offer: Offer) -> float:
    behind = offer.shard.decode_evidence
    if offer.shard.decode_ms is None or behind is None or behind.count < KNOWN_SAMPLES:
        return MOST_STALE
    return min(MOST_STALE, 1 + behind.age_s / STALE_S)
