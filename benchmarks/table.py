"""A measurement as tables for people. Computes nothing of its own."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.busy import QUIET_CORES
from benchmarks.figures import WINDOW, Interval, Spread, agreement
from benchmarks.generate import GENERATE
from benchmarks.measurement import Measurement
from benchmarks.summary import NAMED, comparisons, verdicts, window_medians

MEGA = 10**6


def print_tables(found: Measurement, console: Console) -> None:
    """Speeds, the stateless path, memory, where a step goes, and the ratios that are asked for."""
    console.print(_speeds(found))
    if found.stateless:
        console.print(_stateless(found))
    console.print(_windows(found))
    console.print(_where(found))
    console.print(_memory(found))
    for line in _verdicts(found):
        console.print(line)


def _speeds(found: Measurement) -> Table:
    plan, facts = found.plan, found.facts
    table = Table(
        title=f"{found.model.title}, {plan.dtype}, {plan.threads} threads, {plan.device}",
        caption=f"median (interval of confidence {Interval.of([0.0] * plan.repeats).confidence:.2f}) of "
        f"{plan.repeats} repeats; {found.prompt_tokens} prompt tokens, "
        f"{plan.new_tokens} new ones; torch {facts['torch']}, transformers {facts['transformers']}, "
        f"{facts['cores']} cores, load {facts['load_before']} before the start",
    )
    titles = (
        "system",
        "first token, s",
        "tokens/s",
        f"first {WINDOW}",
        f"last {WINDOW}",
        "kept",
        "same tokens",
        "cores",
    )
    for title in titles:
        table.add_column(title, justify="left" if title == "system" else "right")
    for name, runs in found.runs.items():
        same = [agreement(run.tokens, other.tokens) for run, other in zip(runs, found.runs[GENERATE], strict=True)]
        table.add_row(
            name,
            Interval.of(run.times.ttft_s for run in runs).brief(3),
            Interval.of(run.times.tokens_per_s for run in runs).brief(1),
            Interval.of(run.times.first_window for run in runs).brief(1),
            Interval.of(run.times.last_window for run in runs).brief(1),
            Interval.of(run.times.retention for run in runs).brief(),
            str(min(same)) if all(run.tokens for run in runs) else "not told",
            Spread.of(run.facts["busy_cores"] for run in runs).shown(),
        )
    return table


def _stateless(found: Measurement) -> Table:
    table = Table(title="one step of the stateless path, by tokens answered so far", caption="the reference: no cache")
    table.add_column("tokens answered")
    table.add_column("seconds a step", justify="right")
    table.add_column("tokens/s", justify="right")
    for length, seconds in sorted(found.stateless.items()):
        spread = Spread.of(seconds)
        table.add_row(str(length), spread.shown(3), f"{1 / spread.median:.2f}")
    return table


def _windows(found: Measurement) -> Table:
    table = Table(title=f"tokens/s in windows of {WINDOW}")
    columns = {name: window_medians(runs) for name, runs in found.runs.items()}
    table.add_column("tokens")
    for name in columns:
        table.add_column(name, justify="right")
    for index in range(min(map(len, columns.values()))):
        label = f"{index * WINDOW + 1}-{(index + 1) * WINDOW}"
        table.add_row(label, *(f"{values[index]:.2f}" for values in columns.values()))
    return table


def _where(found: Measurement) -> Table:
    table = Table(title="where a decode step goes, ms (medians, so the parts add up nearly)")
    told: dict[str, list[dict[str, Any]]] = {
        name: [run.facts["step_ms"] for run in runs] for name, runs in found.runs.items() if "step_ms" in runs[0].facts
    }
    table.add_column("part")
    for name in told:
        table.add_column(name, justify="right")
    parts = list(dict.fromkeys(part for rows in told.values() for part in rows[0]))
    for part in parts:
        cells = [f"{median(row[part] for row in rows):.2f}" if part in rows[0] else "" for rows in told.values()]
        table.add_row(part, *cells)
    for name, runs in found.runs.items():
        if bytes_per_step := runs[-1].facts.get("bytes_per_step"):
            table.caption = f"{name}: bytes of body into each hop for a step: {', '.join(map(str, bytes_per_step))}"
            break
    return table


def _memory(found: Measurement) -> Table:
    table = Table(title="most memory held by each process, MB")
    table.add_column("system")
    table.add_column("process")
    table.add_column("MB", justify="right")
    for name, processes in found.peak_rss.items():
        for process, peak in processes.items():
            table.add_row(name, process, "not told" if peak is None else f"{peak / MEGA:,.0f}")
    return table


def _verdicts(found: Measurement) -> list[str]:
    asked = verdicts(found)
    lines = [
        asked[key].shown() if key in asked else f"{NAMED.get(key, key.replace('_', ' '))}: {interval.shown(3)}"
        for key, interval in comparisons(found).items()
    ]
    lines += [f"not measured: {name}: {reason}" for name, reason in found.absent.items()]
    elsewhere = max(run.facts["busy_elsewhere"] for runs in found.runs.values() for run in runs)
    if elsewhere > QUIET_CORES:
        lines.append(
            f"DOUBTFUL: up to {elsewhere:.2f} cores were busy with other work meanwhile; measure on a quiet machine"
        )
    return lines
