"""What loading a shard reads, holds and costs in memory, beside the whole model; each in a fresh process.

    python -m benchmarks.loading [--models qwen2-0.5b,smollm2] [--dtype bfloat16]

Layers 21-23 of Qwen2.5-0.5B's shape (with the tied embeddings that the last layer needs as its output projection), a
middle shard, and the whole model; from safetensors and from GGUF, each GGUF converted anew into an empty cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import environment
from benchmarks.models import MODELS
from benchmarks.results import publish

MEGA = 10**6
SHARE_TARGET = 0.38  # of the model's bytes, for layers 21-23 of Qwen2.5-0.5B's shape


@dataclass(frozen=True, slots=True)
class Case:
    """One shard to load.

    Attributes:
        model: key of the model.
        source: ``safetensors`` or ``gguf``.
        layers: inclusive, as people type them.
        what: for people.
        target: the most of the model's bytes that it may read and hold; None where nothing is asked.
    """

    model: str
    source: str
    layers: str
    what: str
    target: float | None = None


CASES = (
    Case("qwen2-0.5b", "safetensors", "0-23", "whole"),
    Case("qwen2-0.5b", "safetensors", "21-23", "last three", SHARE_TARGET),
    Case("qwen2-0.5b", "safetensors", "10-12", "three in the middle"),
    Case("qwen2-0.5b", "gguf", "0-23", "whole"),
    Case("qwen2-0.5b", "gguf", "21-23", "last three", SHARE_TARGET),
    Case("qwen2-0.5b", "gguf", "10-12", "three in the middle"),
    Case("smollm2", "gguf", "0-29", "whole"),
    Case("smollm2", "gguf", "27-29", "last three"),
    Case("smollm2", "gguf", "14-16", "three in the middle"),
)


def load(case: Case, dtype: str) -> dict[str, Any]:
    """Load the shard in a process of its own; see `load_worker` for what comes back.

    Raises:
        RuntimeError: that process failed; it has said why.
    """
    arguments = [case.model, case.source, case.layers, "--dtype", dtype]
    command = [sys.executable, "-m", "benchmarks.load_worker", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"loading layers {case.layers} of {case.model} failed (exit code {done.returncode})")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """JSON-ready: the measured bytes with their shares of the whole model's."""
    return {
        "model": case.model,
        "source": case.source,
        "layers": case.layers,
        "what": case.what,
        **found,
        "read_share": round(found["read_bytes"] / found["model_bytes"], 4),
        "held_share": round(found["held_bytes"] / found["model_held_bytes"], 4),
        "target": case.target,
    }


def print_table(rows: list[dict[str, Any]], dtype: str, console: Console) -> None:
    """All rows, with what is asked where something is."""
    table = Table(
        title=f"loading a shard in {dtype}, in megabytes (10^6)",
        caption="read: of the model's file. held: weights in memory. shares: of the whole model's.\n"
        "peaks: the most memory beyond that of a process with torch and transformers imported and nothing loaded;\n"
        "opening: while config and tokenizer are read, which makes a GGUF's into files, the first time; "
        "loading: while weights are converted and loaded",
    )
    columns = ("model", "from", "layers", "read", "share", "held", "share", "opening", "loading", "without", "asked")
    for index, title in enumerate(columns):
        table.add_column(title, justify="left" if index < 3 else "right")
    for entry in rows:
        within = entry["target"] is None or max(entry["read_share"], entry["held_share"]) <= entry["target"]
        asked = "" if entry["target"] is None else f"{entry['target']}: {'reached' if within else 'MISSED'}"
        table.add_row(
            entry["model"],
            entry["source"],
            f"{entry['layers']} ({entry['what']})",
            f"{entry['read_bytes'] / MEGA:,.1f}",
            f"{entry['read_share']:.3f}",
            f"{entry['held_bytes'] / MEGA:,.1f}",
            f"{entry['held_share']:.3f}",
            _mega(entry["opening_peak_bytes"]),
            _mega(entry["peak_bytes"]),
            _mega(entry["idle_bytes"]),
            asked,
        )
    console.print(table)


def _mega(count: int | None) -> str:
    return "not told" if count is None else f"{count / MEGA:,.0f}"


def main() -> None:
    """Load each case, write a table to standard error, and keep the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=__doc__.partition("\n")[0])
    known = tuple(dict.fromkeys(case.model for case in CASES))
    parser.add_argument("--models", default=",".join(known), help="keys, with commas (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    given = parser.parse_args()
    keys = given.models.split(",")
    if unknown := [key for key in keys if key not in known]:
        parser.error(f"no cases for {', '.join(unknown)}; there are {', '.join(known)}")
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 140)
    rows = []
    for case in CASES:
        if case.model in keys:
            console.print(f"{MODELS[case.model].title}: layers {case.layers} from {case.source}", style="dim")
            rows.append(row(case, load(case, given.dtype)))
    print_table(rows, given.dtype, console)
    publish("loading", {"benchmark": "loading", "dtype": given.dtype, "environment": environment.facts(), "rows": rows})


if __name__ == "__main__":
    main()
