"""What routes through a simulated mesh really take, and what the best one would, if all were known.

Nobody in the mesh sees this; the simulation measures their choices by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from benchmarks.simulated_mesh import BETWEEN_FRAMES, HIDDEN, MODEL, Geography, SimulatedNode
from meshnet_core.demand import Demand
from meshnet_core.estimate import Evidence
from meshnet_core.link_info import LinkInfo
from meshnet_core.membership import NodeInfo, Snapshot
from meshnet_core.planning import plan_route
from meshnet_core.route import Route

ALL_LINKS_BELOW = 150  # nodes: for more, the optimum knows true links where there are measured ones


class Truth:
    """Of the mesh that ``nodes`` are, as they come and go."""

    def __init__(self, nodes: Mapping[str, SimulatedNode], geography: Geography) -> None:
        self._nodes = nodes
        self._geography = geography

    def ms(self, route: Route, demand: Demand) -> float:
        """What a token on a route really takes now, with its share of the prompt, in milliseconds."""
        total, before = 0.4, None
        for hop in route.hops:
            node = self._nodes[hop.node_id]
            ms = node.true_ms * (1 + demand.prompt / demand.answer / 16) * len(hop.layers)
            total += ms + BETWEEN_FRAMES * node.sessions * node.true_ms * len(node.layers or hop.layers)
            if before is not None:
                position_ms = HIDDEN * 2 / 2**20 * 8.0 * (1 + demand.prompt / demand.answer)
                total += self._geography.rtt_ms(before, node) * (1 + demand.prompt / 256 / demand.answer) + position_ms
            before = node
        return total

    def best_ms(self, demand: Demand) -> float:
        """What it takes on the route that is planned by what is true."""
        known = {node.node_id: self._announced(node) for node in self._nodes.values() if node.layers is not None}
        best = plan_route(Snapshot(tuple(known[node_id] for node_id in sorted(known))), MODEL, demand=demand)
        return self.ms(best, demand)

    def _announced(self, node: SimulatedNode) -> NodeInfo:
        """The node, as it would announce itself if it knew all."""
        info = node.info()
        held = tuple(replace(one, decode_ms=node.true_ms, prefill_ms=node.true_ms / 16) for one in info.shards)
        if len(self._nodes) < ALL_LINKS_BELOW:
            others = [one for one in self._nodes.values() if one is not node]
        else:
            others = [self._nodes[one.node_id] for one in info.links if one.node_id in self._nodes]
        links = tuple(LinkInfo(one.node_id, self._geography.rtt_ms(node, one), Evidence()) for one in others)
        return replace(info, shards=held, links=links, sessions=node.sessions)
