"""Which version of which part answers, for Prometheus, and what its process uses. Knows no part."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector

from meshnet_core import __version__


def build_info(registry: CollectorRegistry, part: str) -> None:
    """Put ``meshnet_build_info`` into ``registry``, and what is known of this process (``process_…``).

    Args:
        registry: of one part.
        part: ``tracker``, ``node`` or ``gateway``.
    """
    info = Gauge(
        "meshnet_build_info", "Always 1; its labels tell which part this is, and of which version.",
        ["part", "version"], registry=registry,
    )  # fmt: skip
    info.labels(part, __version__).set(1)
    ProcessCollector(registry=registry)
