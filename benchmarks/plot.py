"""Tokens per second over the length of the answer, as a PNG beside the results it is drawn from.

python -m benchmarks.plot benchmarks/results/DATE-MODEL.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

from benchmarks.figures import WINDOW

mpl.use("Agg")  # no display is needed, and none may be there


def save_plot(document: dict[str, Any], path: Path) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description="Draw a result of `make bench`.")
    parser.add_argument("results", type=Path, help="the JSON file; the PNG goes beside it")
    path = parser.parse_args().results
    save_plot(json.loads(path.read_text("utf-8")), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
