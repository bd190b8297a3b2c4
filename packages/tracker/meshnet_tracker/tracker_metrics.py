"""What a tracker counts and measures, for Prometheus. Knows no request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, Metric

from meshnet_core.build_info import build_info
from meshnet_core.turned_away import TurnedAway
from meshnet_tracker.events import KINDS, DirectoryEvent, Expired

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshnet_core.doorkeeper import Doorkeeper
    from meshnet_tracker.directory import Directory


class SharingFigures(Protocol):
    """How the sharing with other trackers goes; `meshnet_tracker.sharing.Sharing` tells it."""

    @property
    def reachable(self) -> bool: ...

    @property
    def failures(self) -> int: ...

    def others(self) -> Sequence[object]: ...


class TrackerMetrics:
    """What the tracker counts, in a registry of its own so that several trackers can live in one process."""

    def __init__(self, directory: Directory, doorkeeper: Doorkeeper, sharing: SharingFigures | None = None) -> None:
        self.registry = CollectorRegistry()
        build_info(self.registry, "tracker")
        self.registry.register(TurnedAway("meshnet_tracker", doorkeeper))
        nodes = Gauge("meshnet_tracker_nodes", "Nodes with a running lease.", registry=self.registry)
        nodes.set_function(lambda: len(directory.snapshot().nodes))
        leases = Gauge(
            "meshnet_tracker_leases",
            "Nodes with a running lease, by who told of them last: the node or another tracker.",
            ["told_by"],
            registry=self.registry,
        )
        leases.labels("node").set_function(lambda: directory.counts()[0])
        leases.labels("tracker").set_function(lambda: directory.counts()[1])
        self.events = Counter(
            "meshnet_tracker_events",
            f"What happened to nodes, by kind: {', '.join(KINDS)}.",
            ["kind"],
            registry=self.registry,
        )
        for kind in KINDS:
            self.events.labels(kind)
        if sharing is not None:
            self._tell_of(sharing)
        self.leases_expired = Counter(
            "meshnet_tracker_leases_expired", "Nodes dropped because they fell silent.", registry=self.registry
        )
        self.routes_planned = Counter("meshnet_tracker_routes_planned", "Routes given out.", registry=self.registry)
        self.refusals = Counter(
            "meshnet_tracker_refusals", "Requests refused, by error code.", ["code"], registry=self.registry
        )
        directory.subscribe(self._count)

    def _tell_of(self, sharing: SharingFigures) -> None:
        reachable = Gauge(
            "meshnet_tracker_registry_reachable",
            "1 while the shared registry answers, 0 while this tracker goes on without it.",
            registry=self.registry,
        )
        reachable.set_function(lambda: sharing.reachable)
        self.registry.register(_RegistryFailures(sharing))
        others = Gauge(
            "meshnet_tracker_other_trackers", "Other trackers that share the directory.", registry=self.registry
        )
        others.set_function(lambda: len(sharing.others()))

    def _count(self, event: DirectoryEvent) -> None:
        self.events.labels(event.kind).inc()
        if isinstance(event, Expired):
            self.leases_expired.inc()


class _RegistryFailures:
    """A collector, as prometheus_client names what is asked for its values at every exposition."""

    def __init__(self, sharing: SharingFigures) -> None:
        self._sharing = sharing

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "meshnet_tracker_registry_failures",
            "Times that the shared registry failed.",
            value=self._sharing.failures,
        )

    def describe(self) -> Iterable[Metric]:
        return ()
