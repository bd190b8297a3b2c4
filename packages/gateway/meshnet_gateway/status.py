"""The gateway's own figures, for Prometheus and for `GET /v1/meshnet/status`. Knows no request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from meshnet_core import __version__
from meshnet_core.build_info import build_info
from meshnet_gateway.live_generations import LiveGenerations
from meshnet_gateway.ports import WaitingFigures

_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)


class GatewayFigures:
    """Counts what the API does.

    Args:
        registry: where the metrics are registered; one gateway per registry.
        active: how many generations are running now.
        room: where they wait for room, if that is known.
    """

    def __init__(
        self, registry: CollectorRegistry, active: Callable[[], int], room: WaitingFigures | None = None
    ) -> None:
        self.registry = registry
        self.live = LiveGenerations()
        self._active = active
        self._room = room
        self._began = time.monotonic()
        self._outcomes: dict[str, int] = {}
        self.requests = Counter(
            "meshnet_gateway_requests",
            "Generations asked for, by endpoint and by how they ended: ok, refused, failed, client_gone",
            ("endpoint", "outcome"),
            registry=registry,
        )
        self.tokens = Counter(
            "meshnet_gateway_tokens",
            "Tokens, by kind: prompt, prompt_cached (those of prompts that were computed for no answer), completion",
            ("kind",),
            registry=registry,
        )
        self.drafted = Counter(
            "meshnet_gateway_drafted_tokens",
            "Tokens that were drafted and sent along, to save round trips; they count as no tokens of answers",
            registry=registry,
        )
        self.accepted = Counter(
            "meshnet_gateway_accepted_tokens", "Drafted tokens that were those of the answer", registry=registry
        )
        self.recoveries = Counter(
            "meshnet_gateway_recoveries",
            "Failures of hops that answers outlived or died of: the error, a cache miss's reason, what was done",
            ("error", "reason", "action"),
            registry=registry,
        )
        self.first_token = Histogram(
            "meshnet_gateway_time_to_first_token_seconds",
            "From the request to the first token of its answer",
            buckets=_SECONDS,
            registry=registry,
        )
        self.duration = Histogram(
            "meshnet_gateway_generation_seconds", "From the request to its end", buckets=_SECONDS, registry=registry
        )
        gauge = Gauge("meshnet_gateway_active_generations", "Generations running now", registry=registry)
        gauge.set_function(active)
        build_info(registry, "gateway")
        if room is not None:
            registry.register(_RoomCollector(room))

    def ended(self, endpoint: str, outcome: str) -> None:
        self.requests.labels(endpoint, outcome).inc()
        self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1

    def recovered(self, event: Mapping[str, Any]) -> None:
        """One of a generation report's ``recoveries``."""
        self.recoveries.labels(event["error"], event.get("reason", ""), event["action"]).inc()

    def exposition(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "uptime_s": round(time.monotonic() - self._began, 1),
            "active_generations": self._active(),
            "running": self.live.to_json(),
            "latest": self.live.latest(),
            "answer_tokens": self.live.tokens,
            "requests": dict(sorted(self._outcomes.items())),
            **({} if self._room is None else {"waiting_for_room": self._room.waiting}),
        }


class _RoomCollector:
    """A collector, as prometheus_client names what is asked for its values at every exposition."""

    def __init__(self, room: WaitingFigures) -> None:
        self._room = room

    def collect(self) -> Iterable[Metric]:
        room = self._room
        yield GaugeMetricFamily(
            "meshnet_gateway_waiting_generations", "Generations waiting for room at the nodes now", value=room.waiting
        )
        yield CounterMetricFamily(
            "meshnet_gateway_waits", "How often a generation had to wait for room", value=room.waits
        )
        yield CounterMetricFamily(
            "meshnet_gateway_waited_seconds", "Time spent waiting for room, by all together", value=room.waited_s
        )
        yield CounterMetricFamily(
            "meshnet_gateway_waits_in_vain",
            "How often a generation found no room in time, or too many waiting, and ended with a 429",
            value=room.turned_away,
        )

    def describe(self) -> Iterable[Metric]:
        return ()
