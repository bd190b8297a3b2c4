"""The page about metrics, made from what the parts register.

``python -m meshnet_cli.metric_reference > docs/metrics.md`` writes it.

Each part's metrics are made and used once, so that all their labels show. Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from meshnet_core.clock import ManualClock
from meshnet_core.doorkeeper import Doorkeeper
from meshnet_core.frames import HopTiming
from meshnet_core.turned_away import TurnedAway
from meshnet_gateway.status import GatewayFigures
from meshnet_gateway.waiting_room import WaitingRoom
from meshnet_node.node_metrics import COUNTS, FORM_STREAM, GAUGES, TOTALS, NodeMetrics
from meshnet_tracker.directory import Directory
from meshnet_tracker.tracker_metrics import TrackerMetrics

_SERIES = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_count", "_sum"),
    "gauge": ("",),
}
_HEAD = """# Metrics

<!-- Made by `python -m meshnet_cli.metric_reference > docs/metrics.md`; a test holds this page to the code. -->

Every part answers `GET /metrics` in Prometheus' text format, and has two paths for what watches it. `/healthz` is 200
while the process answers (a node's tells its status too). `/readyz` is 200, or 503 with the reason:

- a tracker is ready while it takes requests, and no more once it is stopping;
- a node is ready once it is registered with a tracker and has layers loaded, and no more while it drains;
- a gateway is ready while some model can answer, by what a tracker said last.

In a mesh with certificates the tracker's and the nodes' paths are for machines of the mesh alone. Where a gateway has
API keys, `/metrics` needs one; `/healthz` and `/readyz` need none and then tell nothing of the mesh but yes or no.

Units are seconds, bytes and positions; counters end in `_total` and begin at 0 with each start of the process.
Histograms have `_bucket`, `_sum` and `_count`. No label has a value that a client chooses. A process also tells what
it uses itself, on Linux: `process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_open_fds` and the
like.

A dashboard for Grafana is in [deploy/grafana/meshnet.json](../deploy/grafana/meshnet.json), alert rules are in
[deploy/prometheus/alerts.yml](../deploy/prometheus/alerts.yml), with a configuration to begin from beside them. A
test holds both to the names and labels here; no Grafana and no `promtool` has read them, since none was at hand.
"""


@dataclass(frozen=True, slots=True)
class MetricFacts:
    """One metric as it is told.

    Attributes:
        name: without what a histogram's or counter's series add to it.
        kind: ``counter``, ``gauge`` or ``histogram``.
        labels: sorted.
        text: what it says.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which queries find it."""
        return tuple(self.name + ending for ending in _SERIES[self.kind])

    @property
    def shown(self) -> str:
        name = self.name + ("_total" if self.kind == "counter" else "")
        return name + ("{" + ", ".join(self.labels) + "}" if self.labels else "")


def facts() -> dict[str, list[MetricFacts]]:
    """All metrics by part, those of the process itself left out."""
    return {
        part: sorted(_read(registry), key=lambda fact: fact.name)
        for part, registry in (("tracker", _tracker()), ("node", _node()), ("gateway", _gateway()))
    }


def page() -> str:
    """``docs/metrics.md``."""
    lines = [_HEAD]
    for part, found in facts().items():
        lines.append(f"## The {part}\n\n| metric | kind | what it says |\n| --- | --- | --- |")
        lines += [f"| `{fact.shown}` | {fact.kind} | {fact.text} |" for fact in found]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _read(registry: CollectorRegistry) -> Iterator[MetricFacts]:
    for metric in registry.collect():
        if metric.name.startswith("process_") or metric.name.endswith("_created"):
            continue
        labels = {label for sample in metric.samples for label in sample.labels if label != "le"}
        yield MetricFacts(metric.name, metric.type, tuple(sorted(labels)), metric.documentation.rstrip("."))


class _Sharing:
    """With one other tracker; a metric's labels need no Redis."""

    reachable, failures = True, 0

    def others(self) -> list[object]:
        return [self]


def _doorkeeper() -> Doorkeeper:
    return Doorkeeper(ManualClock(), per_s=1, burst=1)


def _tracker() -> CollectorRegistry:
    metrics = TrackerMetrics(Directory(ManualClock()), _doorkeeper(), _Sharing())
    metrics.refusals.labels("invalid_input")
    return metrics.registry


def _node() -> CollectorRegistry:
    by_reason: dict[str, dict[str, int]] = {key: {"evicted": 1} for key in COUNTS}
    metrics = NodeMetrics(lambda: {**dict.fromkeys([*GAUGES, *TOTALS], 0), **by_reason, "batches": {"1": 1}})
    metrics.answered("/hop/forward", "ok", 0.01, 4)
    metrics.ran(HopTiming(0))
    metrics.took(FORM_STREAM)
    metrics.registry.register(TurnedAway("meshnet_node", _doorkeeper()))
    return metrics.registry


def _gateway() -> CollectorRegistry:
    figures = GatewayFigures(CollectorRegistry(), lambda: 0, WaitingRoom(ManualClock()))
    figures.ended("chat", "ok")
    figures.recovered({"error": "deadline", "action": "Reroute"})
    figures.tokens.labels("prompt")
    figures.registry.register(TurnedAway("meshnet_gateway", _doorkeeper()))
    return figures.registry


if __name__ == "__main__":
    sys.stdout.write(page())
