"""What a node counts about the calls it answers, for Prometheus. Knows no HTTP and nothing of how sessions are held."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from meshnet_core.build_info import build_info
from meshnet_core.frames import FrameReply, HopTiming

# From a decode step of a tiny model on loopback to a prefill chunk of a large one on a slow machine.
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_FRAMES = (1, 2, 4, 8, 16, 32)
# Numbers of a node's status, with what they say; those that a status lacks are left out.
GAUGES = {
    "sessions": "Sessions that the node holds state of.",
    "state_bytes": "Bytes of session state held.",
    "reserved_bytes": "Bytes of session state held or set aside.",
    "budget_bytes": "Bytes of session state that the node may hold.",
    "prefixes": "Prefixes held on of sessions that are over.",
    "prefix_bytes": "Bytes of held prefixes; they count among the reserved ones.",
    "max_sessions": "Sessions that the node may hold state of.",
    "queued": "Frames that wait for the forward lane or run there.",
    "loaded_shards": "Shards in memory, or on their way there.",
    "registered": "1 while the last heartbeat reached a tracker.",
    "ready": "1 while the node takes new sessions; see `/readyz`.",
    "draining": "1 while the node takes no new sessions because it is about to leave.",
}
# Counts without a label, and by reason, in the same way.
TOTALS = {
    "shard_loads": "How often a shard was loaded into memory.",
    "shard_drops": "How often a shard gave way to another one.",
    "drains": "How often the node began to drain.",
    "prefixes_evicted": "Prefixes dropped for want of room.",
    "prefill_positions_saved": "Positions that sessions began beyond, since prefixes of theirs were held here.",
}
COUNTS = {
    "dropped": ("sessions_dropped", "Sessions whose state was dropped, by reason."),
    "misses": ("misses", "Frames and opens refused because the node had no usable state for them, by reason."),
}
FORM_HTTP, FORM_STREAM = "http", "stream"  # what a frame came as


class NodeMetrics:
    """Counters of one node, in a registry of their own so that several nodes can share a process.

    Args:
        status: the node's status; what this module knows of it is read when somebody asks for the metrics.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self.registry = CollectorRegistry()
        build_info(self.registry, "node")
        self.registry.register(_StatusGauges(status))
        self._calls = Counter(
            "meshnet_node_calls",
            "Calls answered, by call and by `ok` or the error's code.",
            ["call", "result"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "meshnet_node_call_seconds",
            "From a call's arrival to its answer, later hops included.",
            ["call"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._received = Counter(
            "meshnet_node_received_bytes", "Bytes of request bodies, by call.", ["call"], registry=self.registry
        )
        self._frames = Counter(
            "meshnet_node_frames",
            "Frames read, by form: `http` for a post each, `stream` for lean streams.",
            ["form"],
            registry=self.registry,
        )
        self._parts = Histogram(
            "meshnet_node_frame_seconds",
            "Where frames spent their time at this node, by part: queue, forward (its layers), sample (at the tail). "
            "Chunks of a prefill that are acknowledged before they ran are not among them.",
            ["part"],
            buckets=_SECONDS,
            registry=self.registry,
        )

        # What frames are counted by, from the first one on: looking labels up costs more than counting.
        self._of_form = cache(self._frames.labels)
        self._of_part = cache(self._parts.labels)
        self._of_call = cache(self._calls.labels)
        self._seconds_of = cache(self._seconds.labels)
        self._received_of = cache(self._received.labels)

    def took(self, form: str) -> None:
        """Count one frame that was read."""
        self._of_form(form).inc()

    def replied(self, reply: FrameReply) -> None:
        """Count where a frame spent its time that was replied to, if it has run here by then."""
        if reply.timings and reply.timings[0].forward_ms:
            self.ran(reply.timings[0])

    def ran(self, timing: HopTiming) -> None:
        """Count where a frame that has run here spent its time."""
        self._of_part("queue").observe(timing.queue_ms / 1000)
        self._of_part("forward").observe(timing.forward_ms / 1000)
        if timing.sample_ms:
            self._of_part("sample").observe(timing.sample_ms / 1000)

    def answered(self, call: str, result: str, seconds: float, received: int) -> None:
        """Count one call: its name, ``ok`` or the error's code, seconds taken and bytes of body."""
        self._of_call(call, result).inc()
        self._seconds_of(call).observe(seconds)
        self._received_of(call).inc(received)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format (:attr:`content_type`)."""
        return generate_latest(self.registry)


class _StatusGauges:
    """A collector, as prometheus_client names what is asked for its values at every exposition."""

    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        for key, text in GAUGES.items():
            if key in status:
                yield GaugeMetricFamily(f"meshnet_node_{key}", text, value=float(status[key]))

        for key, (name, text) in COUNTS.items():
            by_reason = CounterMetricFamily(f"meshnet_node_{name}", text, labels=["reason"])
            for reason, count in status.get(key, {}).items():
                by_reason.add_metric([reason], count)
            yield by_reason
        if "batches" in status:
            yield _frames_together({int(frames): count for frames, count in status["batches"].items()})
        for key, text in TOTALS.items():
            if key in status:
                yield CounterMetricFamily(f"meshnet_node_{key}", text, value=float(status[key]))

    def describe(self) -> Iterable[Metric]:
        return ()


def _frames_together(batches: dict[int, int]) -> Metric:
    """A histogram of how many frames -> how often."""
    upto = [(str(float(most)), sum(count for frames, count in batches.items() if frames <= most)) for most in _FRAMES]
    return HistogramMetricFamily(
        "meshnet_node_batch_frames",
        "Decode steps that ran in one forward, each of a session of its own.",
        buckets=[*upto, ("+Inf", sum(batches.values()))],
        sum_value=sum(frames * count for frames, count in batches.items()),
    )
