"""Routing and placement in a large mesh with churn, in simulated time, on the real code.

    python -m benchmarks.routing_simulation [--nodes 30,100,300,1000,3000,10000] [--seconds 120] [--seed 1]

The tracker's directory, its plans, leases and draws, placement, the gateway's memory of blame, and how nodes measure
themselves and their links are the production ones; machines, links, answers and the clock are simulated. Machines live
ten minutes on average: half leave, half die without a word, and the answers that run through them go on elsewhere. A
twentieth of them is five times as slow as usual at any moment, which only measuring tells.

*Success* is the share of answers that came to their end. *By the optimum* is what the route that was chosen really
takes by what the best one would take, if all were known: the same planning on true speeds, loads and links, without the
dead. A route that explores is told apart. Planning and heartbeats are timed for real.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from benchmarks import environment
from benchmarks.results import publish
from benchmarks.routing_figures import HEARTBEAT_S, Tally, figure, print_table
from benchmarks.routing_truth import Truth
from benchmarks.simulated_mesh import MODEL, Geography, SimulatedNode, facts, new_node
from meshnet_core.clock import ManualClock
from meshnet_core.demand import Demand
from meshnet_core.errors import MeshnetError, UnknownNodeError
from meshnet_core.exploration import RouteDraws, explores
from meshnet_core.membership import NodeInfo
from meshnet_core.route import Hop, Route
from meshnet_gateway.blame import BlameMemory
from meshnet_node.speed_watch import changed
from meshnet_tracker.directory import Directory
from meshnet_tracker.placement import place
from meshnet_tracker.replan import replan

LIFE_S = 600.0
SLOW_EVERY_S, SLOW_FOR_S = 600.0, 30.0
PROBE_S, LINKS_S, REPLACE_S, BACK_S = 10.0, 20.0, 15.0, 5.0
NOTICED_S = 0.5  # until a gateway finds that a hop died
PATIENCE_S = 60.0  # that an answer waits for a route
MOST_ANSWERS_PER_S = 3.0
PLANNED_NODES_PER_S = 1500.0  # answers that come in a second, times nodes: so that a large mesh is simulated in minutes
LOOK_AT_ONE_IN = 3  # answers whose route is compared with the optimum


@dataclass(eq=False)
class Answer:
    """One generation under way."""

    demand: Demand
    began: float
    left: float  # tokens to be made
    route: Route | None = None
    step_ms: float = 0.0
    since: float = 0.0
    failing_since: float | None = None
    turn: int = 0  # counts routes: an end that was foreseen for an older one is none


class Simulation:
    """One mesh of so many machines, from its start on."""

    def __init__(self, nodes: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.drawn = [1.0]
        self.directory = Directory(self.clock, draws=_Watched(seed, self.drawn))
        self.geography = Geography(self.rng)
        self.blame = BlameMemory(self.clock)
        self.tally = Tally()
        self.nodes: dict[str, SimulatedNode] = {}
        self.truth = Truth(self.nodes, self.geography)
        self.running: dict[Answer, None] = {}  # in the order in which they began: a set has none
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._numbers = itertools.count()
        self._unplaced = False
        self.per_s = min(MOST_ANSWERS_PER_S, nodes / 30, PLANNED_NODES_PER_S / nodes)
        for _ in range(nodes):
            self._join()
        self.tally.joins = 0
        self._place(anew=True)
        self._after(self.rng.expovariate(self.per_s) + 2 * HEARTBEAT_S, self._arrive)
        self._after(REPLACE_S, self._replace)

    def run(self, seconds: float) -> Tally:
        """Simulate; answers that are under way at the end are not counted."""
        while self._events and self._events[0][0] <= seconds:
            at, _, event = heapq.heappop(self._events)
            self.clock.advance(max(0.0, at - self.clock.now()))
            event()
        return self.tally

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.clock.now() + seconds, next(self._order), event))

    # -- machines -----------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        node = new_node(next(self._numbers), self.clock, self.rng)
        self.nodes[node.node_id] = node
        self.tally.joins += 1
        self._unplaced = True
        self._after(self.rng.uniform(0, HEARTBEAT_S), lambda: self._heartbeat(node))
        self._after(self.rng.uniform(0, 1), lambda: self._probe(node))
        self._after(self.rng.uniform(0, LINKS_S), lambda: self._probe_links(node))
        self._after(self.rng.expovariate(1 / LIFE_S), lambda: self._go(node))
        self._after(self.rng.expovariate(1 / SLOW_EVERY_S), lambda: self._slow_down(node))

    def _here(self, node: SimulatedNode) -> bool:
        return self.nodes.get(node.node_id) is node

    def _heartbeat(self, node: SimulatedNode) -> None:
        if self._here(node):
            self._announce(node)
            self._after(HEARTBEAT_S * self.rng.uniform(0.9, 1), lambda: self._heartbeat(node))

    def _announce(self, node: SimulatedNode) -> None:
        node.told = node.info()
        body = json.dumps(node.told.to_wire())
        began = time.perf_counter()
        self.directory.announce(NodeInfo.from_wire(json.loads(body)))
        self.tally.heartbeat_ms.append(1000 * (time.perf_counter() - began))

    def _measure(self, node: SimulatedNode, steps: int) -> None:
        """And what changed much is told at once, as nodes do."""
        node.measure(steps, self.rng)
        if self._here(node) and node.told is not None and changed(node.told, node.info()):
            self._announce(node)

    def _probe(self, node: SimulatedNode) -> None:
        if self._here(node):
            if node.layers is not None and node.measured_age_s() >= PROBE_S:
                self._measure(node, 2)
            self._after(PROBE_S * self.rng.uniform(0.5, 1), lambda: self._probe(node))

    def _probe_links(self, node: SimulatedNode) -> None:
        if self._here(node):
            for neighbour in self.directory.neighbours(node.node_id, self.rng.random()):
                if (other := self.nodes.get(neighbour.node_id)) is not None:
                    self._measure_link(node, other)
            self._after(LINKS_S * self.rng.uniform(0.5, 1), lambda: self._probe_links(node))

    def _measure_link(self, sender: SimulatedNode, other: SimulatedNode) -> None:
        sender.links.took(other.node_id, self.geography.rtt_ms(sender, other) * max(0.2, self.rng.gauss(1, 0.1)), 0.0)

    def _slow_down(self, node: SimulatedNode) -> None:
        if self._here(node):
            node.slow_until = self.clock.now() + SLOW_FOR_S
            self._after(SLOW_FOR_S + self.rng.expovariate(1 / SLOW_EVERY_S), lambda: self._slow_down(node))

    def _go(self, node: SimulatedNode) -> None:
        """Leave or die; somebody else comes a little later."""
        if self.rng.random() < 0.5:
            self.tally.leaves += 1
            with suppress(UnknownNodeError):  # it was here too shortly to be known
                self.directory.leave(node.node_id, f"b-{node.node_id}")
        else:
            self.tally.deaths += 1
        del self.nodes[node.node_id]
        self._unplaced = True
        for answer in [one for one in self.running if one.route and _uses(one.route, node.node_id)]:
            self.tally.hit += 1
            self._stop(answer)
            self.blame.blame(node.node_id)
            self._after(NOTICED_S, lambda answer=answer: self._go_on(answer))  # type: ignore[misc]
        self._after(BACK_S, self._join)

    def _replace(self) -> None:
        if self._unplaced:
            self._place(anew=False)
        self._after(REPLACE_S, self._replace)

    def _place(self, *, anew: bool) -> None:
        """What the tracker's placement gives everybody to hold."""
        self._unplaced = False
        machines = [node.machine for node in self.nodes.values()]
        began = time.perf_counter()
        placed = place(machines, facts()) if anew else replan(machines, facts(), for_speed=False)
        self.tally.replan_ms.append(1000 * (time.perf_counter() - began))
        for node_id, layers in placed.ranges.items():
            node = self.nodes[node_id]
            if node.layers != layers:
                node.layers = layers
                self._measure(node, 2)  # as nodes do once they have loaded

    # -- answers ------------------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        demand = Demand(prompt=self.rng.choice([30, 128, 800]), answer=self.rng.choice([20, 60, 200]))
        answer = Answer(demand, self.clock.now(), demand.answer)
        self.tally.answers += 1
        self._go_on(answer)
        self._after(self.rng.expovariate(self.per_s), self._arrive)

    def _go_on(self, answer: Answer) -> None:
        """Plan a route and follow it, as far as it leads; a dead hop is found when it is opened."""
        first = answer.turn == 0
        demand = replace(answer.demand, explore=first)
        while True:
            began = time.perf_counter()
            try:
                route = self.directory.plan(MODEL, self.blame.excluded(), demand=demand)
            except MeshnetError:
                route = None
            self.tally.plan_ms.append(1000 * (time.perf_counter() - began))
            if route is None:
                self._wait(answer)
                return
            dead = [hop.node_id for hop in route.hops if not self._holds(hop)]
            if not dead:
                break
            for node_id in dead:
                self.blame.blame(node_id)
            demand = replace(demand, explore=False)
        answer.failing_since = None
        if first and self.tally.answers % LOOK_AT_ONE_IN == 0:
            self._compare(route, demand)
        self._start(answer, route)

    def _wait(self, answer: Answer) -> None:
        now = self.clock.now()
        answer.turn += 1
        answer.failing_since = now if answer.failing_since is None else answer.failing_since
        if now - answer.failing_since >= PATIENCE_S:
            self.tally.failed += 1
            return
        self._after(2.0, lambda: self._go_on(answer))

    def _start(self, answer: Answer, route: Route) -> None:
        for hop in route.hops:
            self.nodes[hop.node_id].sessions += 1
        answer.route, answer.since = route, self.clock.now()
        answer.turn += 1
        answer.step_ms = self.truth.ms(route, replace(answer.demand, prompt=0))
        takes_ms = answer.left * self.truth.ms(route, replace(answer.demand, answer=max(1, round(answer.left))))
        self.running[answer] = None
        turn = answer.turn
        self._after(takes_ms / 1000, lambda: self._end(answer, turn))

    def _stop(self, answer: Answer) -> None:
        """It runs no longer where it ran; who served it has measured it."""
        if answer.route is None:
            raise RuntimeError("an answer is stopped that does not run")
        self.running.pop(answer, None)
        steps = int(1000 * (self.clock.now() - answer.since) / max(answer.step_ms, 1e-6))
        answer.left = max(1.0, answer.left - steps)
        nodes = [self.nodes.get(hop.node_id) for hop in answer.route.hops]
        for node, following in itertools.zip_longest(nodes, nodes[1:]):
            if node is not None:
                node.sessions -= 1
                self._measure(node, min(steps, 30))
                if following is not None:
                    self._measure_link(node, following)
        answer.route = None
        answer.turn += 1

    def _end(self, answer: Answer, turn: int) -> None:
        if answer in self.running and answer.turn == turn and answer.route is not None:
            for hop in answer.route.hops:
                self.blame.forgive(hop.node_id)
            self._stop(answer)
            self.tally.done += 1

    def _holds(self, hop: Hop) -> bool:
        """Whether the node is there and still has a shard with this end."""
        node = self.nodes.get(hop.node_id)
        return node is not None and node.layers is not None and hop.layers.stop == node.layers.stop

    def _compare(self, route: Route, demand: Demand) -> None:
        taken_ms, best_ms = self.truth.ms(route, demand), self.truth.best_ms(demand)
        told = self.tally.exploring if explores(self.drawn[0]) else self.tally.by_optimum
        told.append(taken_ms / min(taken_ms, best_ms))


class _Watched(RouteDraws):
    """Draws of which the last one is known."""

    def __init__(self, seed: int, last: list[float]) -> None:
        super().__init__(seed)
        self._last = last

    def next(self, model: str, *, explore: bool = True) -> float:
        self._last[0] = super().next(model, explore=explore)
        return self._last[0]


def _uses(route: Route, node_id: str) -> bool:
    return any(hop.node_id == node_id for hop in route.hops)


def main() -> None:
    """Simulate, and write a table to standard error and a JSON line to standard output and into the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing_simulation", description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", default="30,100,300,1000,3000,10000", help="with commas (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=120.0, help="of simulated time (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--dry", action="store_true", help="keep no results")
    arguments = parser.parse_args()
    document: dict[str, Any] = {
        "benchmark": "routing-simulation",
        "seconds": arguments.seconds,
        "seed": arguments.seed,
        "environment": environment.facts(),
        "figures": [],
    }
    figures = []
    for count in (int(text) for text in arguments.nodes.split(",")):
        began = time.perf_counter()
        figures.append(figure(count, Simulation(count, arguments.seed).run(arguments.seconds)))
        Console(stderr=True).print(f"{count} nodes: simulated in {time.perf_counter() - began:.0f} s", style="dim")
        print_table(figures[-1:])
        document["figures"].append(asdict(figures[-1]))
        if not arguments.dry:
            publish("routing-simulation", document)  # after each, since the last ones take long


if __name__ == "__main__":
    main()
