"""Where results go: a JSON file of the results folder, a plot beside it, and where asked a line on standard output."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

FOLDER = Path(__file__).parent / "results"


def add_options(parser: argparse.ArgumentParser, name: str) -> None:
    """What every benchmark takes for its results; ``name`` is that of its files."""
    parser.add_argument(
        "--name", default=name, help="of the files in benchmarks/results, after the date (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="write the result to standard output too, as one line")


def result_path(name: str, suffix: str, folder: Path = FOLDER) -> Path:
    """``results/2026-01-31-NAME.json``; a second run on one day replaces the first."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{dt.datetime.now(dt.UTC):%Y-%m-%d}-{name}{suffix}"


def publish(name: str, document: dict[str, Any], folder: Path = FOLDER, *, line: bool = False) -> Path:
    """Keep ``document``; returns where. With ``line`` it is printed as well."""
    text = json.dumps(document, separators=(",", ":"))
    path = result_path(name, ".json", folder)
    path.write_text(text + "\n", "utf-8")
    if line:
        print(text, flush=True)
    return path


def publish_drawn(name: str, document: dict[str, Any], console: Console, *, line: bool = False) -> Path:
    """Keep ``document`` with a plot beside it, and tell where; otherwise as `publish`."""
    path = publish(name, document, line=line)
    # In a process of its own: matplotlib's memory must not be counted as the driver's.
    subprocess.run([sys.executable, "-m", "benchmarks.plot", path], check=True)
    console.print(f"kept in benchmarks/results: {path.name} and {path.stem}.png", style="dim")
    return path
