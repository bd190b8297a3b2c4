"""Where results go: one JSON line on standard output, and the same line in a file of the results folder."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"


def result_path(name: str, suffix: str, folder: Path = FOLDER) -> Path:
    """``results/2026-01-31-NAME.json``; a second run on one day replaces the first."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{dt.datetime.now(dt.UTC):%Y-%m-%d}-{name}{suffix}"


def publish(name: str, document: dict[str, Any], folder: Path = FOLDER) -> Path:
    """Print ``document`` as one line and keep it; returns where."""
    line = json.dumps(document, separators=(",", ":"))
    path = result_path(name, ".json", folder)
    path.write_text(line + "\n", "utf-8")
    print(line, flush=True)
    return path
