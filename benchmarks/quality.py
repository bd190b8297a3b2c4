"""What quantised weights cost: perplexity of a short English text, against the same model in bfloat16.

    python -m benchmarks.quality [MODEL] [--json]

The text (``tests/data/quality.txt``, 2.8 kB) is short, so differences below a percent mean nothing. Each way is
measured twice: in frames of 256 positions, which unpack weights, and one position at a time, which multiplies them
packed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table

from meshnet_core.layer_range import LayerRange
from meshnet_node.model_files import open_model
from meshnet_node.unsplit_model import UnsplitModel

if TYPE_CHECKING:
    from meshnet_node.model_files import ModelFiles

TEXT = Path(__file__).parent.parent / "tests" / "data" / "quality.txt"
CHUNK = 256
WAYS = ("none", "auto", "int8", "int4")
"""What ``--quantize`` is given; ``none`` is what the others are compared with."""


@dataclass(frozen=True, slots=True)
class Quality:
    """One way to hold the weights.

    Attributes:
        quantize: see :mod:`meshnet_node.weight_choice`; ``int8`` and ``int4`` round the de-quantised weights.
        weight_bytes: of the whole model.
        perplexity: over frames of :data:`CHUNK` positions.
        step_perplexity: one position at a time, over the first ``steps``.
    """

    quantize: str
    weight_bytes: int
    perplexity: float
    step_perplexity: float


def text_ids(files: ModelFiles) -> list[int]:
    """The text in the model's tokens."""
    from tokenizers import Tokenizer  # noqa: PLC0415  only here

    tokenizer = Tokenizer.from_str(files.text_files()["tokenizer.json"].decode())
    ids: list[int] = tokenizer.encode(TEXT.read_text("utf-8"), add_special_tokens=False).ids
    return ids


def perplexity(model: UnsplitModel, ids: Sequence[int], chunk: int) -> float:
    """``exp`` of the mean negative log-likelihood of every token after the first, fed in frames of ``chunk``."""
    state, total = model.open(), 0.0
    for start in range(0, len(ids) - 1, chunk):
        given = ids[start : min(start + chunk, len(ids) - 1)]
        rows = torch.log_softmax(model.frame(given, start, state, len(given)), dim=-1)
        wanted = torch.tensor(ids[start + 1 : start + 1 + len(given)])
        total -= float(rows[torch.arange(len(given)), wanted].sum())
    return math.exp(total / (len(ids) - 1))


def measure(files: ModelFiles, ids: Sequence[int], quantize: str, steps: int) -> Quality:
    """Load the whole model in one way and measure it."""
    everything = LayerRange(0, files.num_layers)
    folder = files.prepare(everything, dtype="bfloat16", packed=quantize == "auto")
    model = UnsplitModel(folder, torch.bfloat16, torch.device("cpu"), quantize)
    return Quality(quantize, model.weight_bytes, perplexity(model, ids, CHUNK), perplexity(model, ids[: steps + 1], 1))


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--steps", type=int, default=200, help="positions that are fed one at a time")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    files = open_model(arguments.model)
    ids = text_ids(files)
    found = [measure(files, ids, way, arguments.steps) for way in WAYS]
    if arguments.json:
        print(json.dumps({"model": files.name, "tokens": len(ids), "ways": [asdict(each) for each in found]}))
        return
    table = Table(title=f"{files.name}, bfloat16, perplexity of {len(ids)} tokens")
    for title in (
        "--quantize",
        "weights, MB",
        f"frames of {CHUNK}",
        "ratio",
        f"first {arguments.steps}, steps",
        "ratio",
    ):
        table.add_column(title, justify="right")
    for each in found:
        table.add_row(
            each.quantize,
            f"{each.weight_bytes / 1e6:.1f}",
            f"{each.perplexity:.3f}",
            f"{each.perplexity / found[0].perplexity:.4f}",
            f"{each.step_perplexity:.3f}",
            f"{each.step_perplexity / found[0].step_perplexity:.4f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
