"""What a doorkeeper counted, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric

from meshnet_core.doorkeeper import Doorkeeper


class TurnedAway:
    """A collector, as prometheus_client names what is asked for its values at every exposition.

    Args:
        prefix: of the metric's name, such as ``meshnet_node``.
        doorkeeper: whose counts.
    """

    def __init__(self, prefix: str, doorkeeper: Doorkeeper) -> None:
        self._name = f"{prefix}_turned_away"
        self._doorkeeper = doorkeeper

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            self._name, "Connections and requests turned away at the door, by reason.", labels=["reason"]
        )
        for reason, count in sorted(self._doorkeeper.turned_away.items()):
            family.add_metric([reason], count)
        yield family

    def describe(self) -> Iterable[Metric]:
        return ()
