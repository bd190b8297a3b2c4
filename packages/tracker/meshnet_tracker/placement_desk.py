"""Tells nodes that leave their layers to the tracker what to hold; what that is, `replan` decides.

Newcomers are kept waiting a moment, so that nodes which start together are placed together. What is told to one node
counts as held at once, under a short lease, until the node announces it as its target: two that ask at the same time
never get the same gap. Soft state like the directory's: a tracker that restarts learns from the nodes what they hold.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from meshnet_core.errors import InvalidInputError
from meshnet_core.placeable import Wish
from meshnet_tracker.mesh_machines import machines_of
from meshnet_tracker.placement import Placement
from meshnet_tracker.replan import replan
from meshnet_tracker.standing import gaps_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshnet_core.clock import Clock
    from meshnet_core.layer_range import LayerRange
    from meshnet_core.membership import NodeInfo, Snapshot
    from meshnet_core.model_facts import ModelFacts
    from meshnet_core.placeable import Placeable
    from meshnet_tracker.machine import Machine

SETTLE_S, LONGEST_SETTLE_S = 1.0, 5.0  # since the newest newcomer, and since the oldest
PROMISE_S = 20.0  # above a lease: the next heartbeat repeats the promise
MOVES_EVERY_S = 60.0  # at most so often is anything moved for speed alone

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Promise:
    layers: LayerRange
    boot: str
    until: float


class PlacementDesk:
    """Answers nodes that ask for their layers.

    Args:
        clock: for waiting and promises.
        snapshot: the nodes now.
    """

    def __init__(self, clock: Clock, snapshot: Callable[[], Snapshot]) -> None:
        self._clock = clock
        self._snapshot = snapshot
        self._promises: dict[str, _Promise] = {}
        self._waiting: dict[str, float] = {}  # newcomers by boot id, and since when
        self._moved_at: dict[str, float] = {}  # by fingerprint: when something was last moved for speed alone
        self._told_at: dict[str, float] = {}  # likewise: when any node was last told anything new
        self._last: dict[str, tuple[list[Machine], bool, Placement]] = {}  # by fingerprint: what `replan` said to what

    def ask(self, node: NodeInfo, snapshot: Snapshot | None = None) -> Wish:
        """What ``node``, as it is announced now, is to hold. Takes long where there are many nodes; another thread than
        the directory's may call it, one at a time, with the ``snapshot`` that it is asked over.

        Raises:
            InvalidInputError: it leaves nothing to the tracker, nothing of the model fits into its memory, or the mesh
                serves other contents under the model's name.
        """
        place = node.placement
        if place is None:
            raise InvalidInputError(f"node {node.node_id} was given its layers and asks for none")
        snapshot, now = self._snapshot() if snapshot is None else snapshot, self._clock.now()
        self._look_round(snapshot, now)
        waits = place.target is None and node.node_id not in self._promises
        if waits:
            _check_contents(place, snapshot)
            if not self._have_settled(now):
                return Wish(None)
        layers = self._place(place.facts, snapshot, now).ranges.get(node.node_id)
        if layers is None and waits and not node.draining:
            raise InvalidInputError(_too_small(place))
        return Wish(layers or place.target, _may_release(node, snapshot, place))

    def _look_round(self, snapshot: Snapshot, now: float) -> None:
        """Drop the promises that are kept, broken or over, and models that nobody asks for; note who is new."""
        places = {node.node_id: (node.boot, node.placement.target) for node in snapshot.nodes if node.placement}
        for node_id, promise in list(self._promises.items()):
            boot, target = places.get(node_id, (None, None))
            if boot != promise.boot or promise.until <= now or target == promise.layers:
                del self._promises[node_id]
        new = {
            node.boot
            for node in snapshot.nodes
            if node.placement is not None and node.placement.target is None and node.node_id not in self._promises
        }
        self._waiting = {boot: self._waiting.get(boot, now) for boot in new}
        there = {node.placement.facts.fingerprint for node in snapshot.nodes if node.placement}
        for of_model in (self._moved_at, self._told_at, self._last):
            for fingerprint in of_model.keys() - there:
                del of_model[fingerprint]

    def _have_settled(self, now: float) -> bool:
        since = self._waiting.values()
        return not since or now - max(since) >= SETTLE_S or now - min(since) >= LONGEST_SETTLE_S

    def _place(self, facts: ModelFacts, snapshot: Snapshot, now: float) -> Placement:
        promised = {node_id: promise.layers for node_id, promise in self._promises.items()}
        machines = machines_of(snapshot, facts, promised)
        if not self._have_settled(now):
            machines = [machine for machine in machines if machine.held is not None]
        whole = not gaps_of(machines, facts.num_layers)
        for_speed = self._may_move_for_speed(facts.fingerprint, machines, now)
        last = self._last.get(facts.fingerprint)
        if last is not None and last[:2] == (machines, for_speed):
            placement = last[2]
        else:
            placement = replan(machines, facts, for_speed=for_speed)
        self._last[facts.fingerprint] = (machines, for_speed, placement)
        moved = [m for m in machines if not m.fixed and placement.ranges.get(m.name, m.held) != m.held]
        if moved:
            self._told_at[facts.fingerprint] = now
        if whole and any(machine.held is not None for machine in moved):
            self._moved_at[facts.fingerprint] = now
        # All of one plan is promised at once: its parts belong together.
        boots = {node.node_id: node.boot for node in snapshot.nodes}
        for name in (machine.name for machine in moved):
            self._promises[name] = _Promise(placement.ranges[name], boots[name], now + PROMISE_S)
            logger.info("node %s is to hold layers %s of %s", name, placement.ranges[name], facts.model)
        return placement

    def _may_move_for_speed(self, fingerprint: str, machines: list[Machine], now: float) -> bool:
        """Now and then; and, so that first measurements move nobody, some time after anything was told, unless somebody
        is new."""
        never = -MOVES_EVERY_S
        rested = now - self._moved_at.get(fingerprint, never) >= MOVES_EVERY_S
        quiet = now - self._told_at.get(fingerprint, never) >= MOVES_EVERY_S
        return rested and (quiet or any(machine.held is None for machine in machines))


def _may_release(node: NodeInfo, snapshot: Snapshot, place: Placeable) -> bool:
    """Whether what ``node`` holds besides its target is held by others, or by itself, where it is to stay."""
    staying: set[int] = set()
    leaving: set[int] = set()
    for other in snapshot.nodes:
        target = None if other.placement is None else other.placement.target
        for shard in other.shards:
            layers = range(shard.layers.start, shard.layers.stop)
            if shard.fingerprint != place.facts.fingerprint or other.draining:
                continue
            if other.placement is None or shard.layers == target:
                staying.update(layers)
            elif other.node_id == node.node_id:
                leaving.update(layers)
    return leaving <= staying


def _check_contents(place: Placeable, snapshot: Snapshot) -> None:
    """Refuse to begin a second model under the name of one that is served."""
    facts = place.facts
    served = {shard.fingerprint for node in snapshot.nodes for shard in node.shards if shard.model == facts.model} | {
        node.placement.facts.fingerprint
        for node in snapshot.nodes
        if node.placement is not None
        and node.placement.target is not None
        and node.placement.facts.model == facts.model
    }
    if served and facts.fingerprint not in served:
        others = ", ".join(sorted(fingerprint[:12] for fingerprint in served))
        raise InvalidInputError(
            f"the mesh serves {facts.model} with fingerprint {others}, and this node's files have "
            f"{facts.fingerprint[:12]}: they are other weights, or another format of them; use the same files"
        )


def _too_small(place: Placeable) -> str:
    facts, width = place.facts, place.facts.width(place.dtype)
    boundaries = facts.boundaries
    least = min(facts.elements(start, stop) for start, stop in pairwise(boundaries))
    return (
        f"no part of {facts.model} fits: the smallest takes {width * least / 2**20:.1f} MiB in {place.dtype} with room "
        f"for sessions, and this node may use {place.memory / 2**20:.1f} MiB; give it more with --memory"
    )
