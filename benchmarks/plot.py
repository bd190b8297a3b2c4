"""A result as a PNG beside the file that it is drawn from.

python -m benchmarks.plot benchmarks/results/DATE-MODEL.json

Of `bench` tokens per second over the length of the answer; of all others what is asked of them: each interval by its
target.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

from benchmarks.figures import WINDOW
from benchmarks.verdict import Verdict

mpl.use("Agg")  # no display is needed, and none may be there
REACHED, MISSED = "tab:green", "tab:red"
LABEL = 60  # letters in a line


def save_windows(document: dict[str, Any], path: Path) -> None:
    """Windows of each system with their least and greatest, and the stateless path's steps."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, system in document["systems"].items():
        by_window = list(zip(*(run["windows"] for run in system["repeats"]), strict=False))
        at = [index * WINDOW + WINDOW / 2 for index in range(len(by_window))]
        (line,) = axes.plot(at, [median(values) for values in by_window], marker="o", markersize=3, label=name)
        low, high = [min(values) for values in by_window], [max(values) for values in by_window]
        axes.fill_between(at, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    if stateless := document["stateless_step_s"]:
        lengths = [int(length) for length in stateless]
        speeds = [1 / step["median"] for step in stateless.values()]
        axes.plot(lengths, speeds, marker="x", linestyle="--", label="two nodes, stateless")
    plan = document["plan"]
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens answered")
    axes.set_ylabel(f"tokens/s (windows of {WINDOW})")
    axes.set_title(f"{document['title']}\n{plan['dtype']}, {plan['threads']} threads, {plan['device']}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def save_verdicts(title: str, verdicts: Mapping[str, Verdict], path: Path) -> None:
    """The interval of each by its target, turned so that right of the line is always better."""
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.45 * len(verdicts)), layout="constrained")
    for row, verdict in enumerate(verdicts.values()):
        low, middle, high = sorted(
            map(verdict.by_target, (verdict.found.low, verdict.found.median, verdict.found.high))
        )
        color = REACHED if verdict.reached else MISSED
        axes.plot([low, high], [row, row], color=color, linewidth=3, solid_capstyle="butt")
        axes.plot(middle, row, marker="o", color=color)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(verdicts)), [label_of(key, verdict) for key, verdict in verdicts.items()], fontsize=8)
    axes.set_ylim(len(verdicts) - 0.5, -0.5)
    told = "by the target: right of 1 is better (median and interval; green: the interval reaches it)"
    axes.set_xlabel(told, fontsize=8)
    axes.set_title(title, fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def label_of(key: str, verdict: Verdict) -> str:
    """What was measured, found and asked, in short lines; ``key`` is told where it is a line of the report."""
    line = f"{key}. " if key[:1].isdigit() else ""
    return textwrap.fill(f"{line}{verdict.what}: {verdict.found.median:.3g}, {verdict.asked}", LABEL)


def save_plot(document: dict[str, Any], path: Path) -> None:
    """Whatever belongs to that kind of result; none where nothing is asked of it."""
    if document["benchmark"] == "decode":
        save_windows(document, path)
    elif verdicts := {key: Verdict.from_json(one) for key, one in document["verdicts"].items()}:
        save_verdicts(document["title"], verdicts, path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description="Draw a result of the benchmarks.")
    parser.add_argument("results", type=Path, help="the JSON file; the PNG goes beside it")
    path = parser.parse_args().results
    save_plot(json.loads(path.read_text("utf-8")), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
