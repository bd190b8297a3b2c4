"""Which nodes a gateway's answers left state on, so that routes can prefer them. A guess: at open nodes tell the truth.

Knows no routes' prices and asks nobody.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from meshnet_core.prefix import Mark

MAX_MARKS = 2**16  # some 20 MiB
MAX_NODES = 8  # of one mark, the last ones


class Whose(NamedTuple):
    """Within what marks mean the same state: a scope, and a model by its fingerprint."""

    scope: str
    fingerprint: str


class PrefixMemory:
    """Marks, least recently used first, each with the nodes that held it."""

    def __init__(self, most: int = MAX_MARKS) -> None:
        self._most = most
        self._nodes: OrderedDict[tuple[Whose, str], tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def learn(self, whose: Whose, marks: Iterable[Mark], nodes: Sequence[str]) -> None:
        """State of ``marks`` was left on all of ``nodes``."""
        for mark in marks:
            at = (whose, mark.key)
            known = [node for node in self._nodes.pop(at, ()) if node not in nodes]
            self._nodes[at] = (*known, *nodes)[-MAX_NODES:]
        while len(self._nodes) > self._most:
            self._nodes.popitem(last=False)

    def correct(self, whose: Whose, marks: Iterable[Mark], node: str, held: Collection[int]) -> None:
        """A node told what of ``marks`` it holds: what was thought beyond that is forgotten."""
        for mark in marks:
            at = (whose, mark.key)
            nodes = self._nodes.get(at, ())
            if node in nodes and mark.position not in held:
                self._nodes[at] = tuple(other for other in nodes if other != node)

    def held(self, whose: Whose, marks: Sequence[Mark]) -> dict[str, int]:
        """How many positions of a sequence with ``marks``, ascending, each node holds, by node id."""
        found: dict[str, int] = {}
        for mark in marks:
            for node in self._nodes.get((whose, mark.key), ()):
                found[node] = mark.position
        return found
