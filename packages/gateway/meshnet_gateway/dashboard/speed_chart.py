"""Tokens per second over time, as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nicegui import ui

_GREY = "#8593a0"  # reads on light and on dark


class SpeedChart:
    """The chart, with the newest figure in words beside it."""

    def __init__(self) -> None:
        self._now = ui.label().classes("mn-quiet")
        self._chart = ui.echart(_options()).classes("mn-chart")
        self._chart.props('role="img" aria-label="tokens per second in the last five minutes"')

    def show(self, points: Sequence[tuple[float, float]], newest: float) -> None:
        """Draw these (seconds from now, tokens per second)."""
        self._now.text = f"{newest:.1f} tokens/s now, all answers together"
        self._chart.options["series"][0]["data"] = [list(point) for point in points]
        self._chart.update()


def _options() -> dict[str, Any]:
    axis = {"axisLine": {"lineStyle": {"color": _GREY}}, "axisLabel": {"color": _GREY}}
    minutes = {"color": _GREY, ":formatter": "value => value === 0 ? 'now' : (value / 60) + ' min'"}
    return {
        "animation": False,
        "aria": {"enabled": True},
        "grid": {"left": 36, "right": 16, "top": 12, "bottom": 26},
        "xAxis": {
            "type": "value", "min": -300, "max": 0, "interval": 60, "splitLine": {"show": False},
            **axis, "axisLabel": minutes,
        },
        "yAxis": {
            "type": "value", "min": 0, "splitLine": {"lineStyle": {"color": _GREY, "opacity": 0.25}},
            **axis, "axisLine": {"show": False}, "axisTick": {"show": False},
        },
        "series": [
            {
                "type": "line", "showSymbol": False, "step": "end", "data": [], "color": "#e0901a",
                "areaStyle": {"opacity": 0.2}, "lineStyle": {"width": 2},
            }
        ],
    }  # fmt: skip
