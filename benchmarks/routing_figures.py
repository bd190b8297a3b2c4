"""What a simulation of routing counts, the figures made of that, and how they are shown. Knows no mesh."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field, replace

from rich.console import Console
from rich.table import Table

HEARTBEAT_S = 5.0


@dataclass
class Tally:
    """What is counted."""

    answers: int = 0
    done: int = 0
    failed: int = 0
    hit: int = 0  # by a death or a leave
    joins: int = 0
    deaths: int = 0
    leaves: int = 0
    by_optimum: list[float] = field(default_factory=list)
    exploring: list[float] = field(default_factory=list)
    plan_ms: list[float] = field(default_factory=list)
    heartbeat_ms: list[float] = field(default_factory=list)
    replan_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Figure:
    """One row; times in milliseconds of real time."""

    nodes: int
    answers: int
    success: float
    hit: int
    joins: int
    leaves: int
    deaths: int
    by_optimum_median: float
    by_optimum_p95: float
    exploring_share: float
    exploring_median: float
    plan_ms_median: float
    plan_ms_p95: float
    heartbeat_ms: float
    replan_ms: float
    core_for_heartbeats: float  # of one core, all the time
    routes_per_s_left: float  # that the rest of the core could plan


def figure(nodes: int, tally: Tally) -> Figure:
    ended = tally.done + tally.failed
    heartbeat_ms, plan_ms = statistics.median(tally.heartbeat_ms), statistics.median(tally.plan_ms)
    core = nodes / HEARTBEAT_S * heartbeat_ms / 1000
    looked_at = len(tally.by_optimum) + len(tally.exploring)
    told = Figure(
        nodes=nodes,
        answers=ended,
        success=tally.done / max(1, ended),
        hit=tally.hit,
        joins=tally.joins,
        leaves=tally.leaves,
        deaths=tally.deaths,
        by_optimum_median=statistics.median(tally.by_optimum),
        by_optimum_p95=_p95(tally.by_optimum),
        exploring_share=len(tally.exploring) / max(1, looked_at),
        exploring_median=statistics.median(tally.exploring or [0.0]),
        plan_ms_median=plan_ms,
        plan_ms_p95=_p95(tally.plan_ms),
        heartbeat_ms=heartbeat_ms,
        replan_ms=statistics.median(tally.replan_ms),
        core_for_heartbeats=core,
        routes_per_s_left=max(0.0, 1 - core) * 1000 / plan_ms,
    )
    return replace(told, **{key: round(value, 4) for key, value in asdict(told).items() if isinstance(value, float)})


def _p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


def print_table(figures: list[Figure]) -> None:
    columns = {
        "nodes": lambda f: str(f.nodes),
        "answers": lambda f: str(f.answers),
        "success": lambda f: f"{f.success:.2%}",
        "hit by a death or leave": lambda f: str(f.hit),
        "joins/leaves/deaths": lambda f: f"{f.joins}/{f.leaves}/{f.deaths}",
        "by the optimum (p95)": lambda f: f"{f.by_optimum_median:.3f} ({f.by_optimum_p95:.2f})",
        "exploring": lambda f: f"{f.exploring_share:.1%}, {f.exploring_median:.2f}",
        "plan ms (p95)": lambda f: f"{f.plan_ms_median:.1f} ({f.plan_ms_p95:.1f})",
        "heartbeat ms": lambda f: f"{f.heartbeat_ms:.3f}",
        "replan ms": lambda f: f"{f.replan_ms:.0f}",
        "core for heartbeats": lambda f: f"{f.core_for_heartbeats:.0%}",
        "routes/s beside": lambda f: f"{f.routes_per_s_left:.0f}",
    }
    table = Table(*columns)
    for one in figures:
        table.add_row(*(shown(one) for shown in columns.values()))
    Console(stderr=True, width=190).print(table)
