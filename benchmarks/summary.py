"""What a measurement comes to: medians, ratios within repeats, and whether they reach what is asked. Pure."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.figures import Spread, agreement, ratios
from benchmarks.measurement import GENERATE, ONE_NODE, TWO_NODES, Measurement
from benchmarks.systems import Run

# Asked of two nodes: of generate()'s decode speed, and of what generate() keeps of its own from first window to last.
SPEED_TARGET = 0.9
RETENTION_TARGET = 0.95


def comparisons(found: Measurement) -> dict[str, Spread]:
    """Ratios within each repeat: ours by ``generate()``'s, and what the cut costs where that was measured."""
    theirs, ours = found.runs[GENERATE], found.runs[TWO_NODES]
    result = {
        "decode_speed": ratios(_speeds(ours), _speeds(theirs)),
        "retention": ratios(_retentions(ours), _retentions(theirs)),
        "first_token_time": ratios([run.times.ttft_s for run in ours], [run.times.ttft_s for run in theirs]),
    }
    if ONE_NODE in found.runs:
        result["two_nodes_by_one_node"] = ratios(_speeds(ours), _speeds(found.runs[ONE_NODE]))
        result["one_node_by_generate"] = ratios(_speeds(found.runs[ONE_NODE]), _speeds(theirs))
    return result


def document(found: Measurement) -> dict[str, Any]:
    """The JSON form of a measurement, for machines; names no machine and no path."""
    theirs = found.runs[GENERATE]
    return {
        "benchmark": "decode",
        "model": found.model.key,
        "title": found.model.title,
        "random_weights": found.model.random,
        "splits": list(found.model.splits),
        "plan": asdict(found.plan),
        "environment": found.facts,
        "prompt_tokens": found.prompt_tokens,
        "seconds": round(found.seconds, 1),
        "systems": {
            name: {
                "ttft_s": Spread.of(run.times.ttft_s for run in runs).to_json(),
                "tokens_per_s": Spread.of(run.times.tokens_per_s for run in runs).to_json(),
                "first_window": Spread.of(run.times.first_window for run in runs).to_json(),
                "last_window": Spread.of(run.times.last_window for run in runs).to_json(),
                "retention": Spread.of(run.times.retention for run in runs).to_json(),
                "peak_rss": found.peak_rss[name],
                "same_tokens_as_generate": [
                    agreement(run.tokens, other.tokens) for run, other in zip(runs, theirs, strict=True)
                ],
                "repeats": [{**run.times.to_json(), **run.facts} for run in runs],
            }
            for name, runs in found.runs.items()
        },
        "stateless_step_s": {
            str(length): Spread.of(seconds).to_json() for length, seconds in sorted(found.stateless.items())
        },
        "ratios": {name: spread.to_json() for name, spread in comparisons(found).items()},
        "targets": {"decode_speed": SPEED_TARGET, "retention": RETENTION_TARGET},
    }


def window_medians(runs: list[Run]) -> list[float]:
    """Tokens per second of each whole window, the median over the repeats."""
    return [median(values) for values in zip(*(run.times.windows() for run in runs), strict=True)]


def _speeds(runs: list[Run]) -> list[float]:
    return [run.times.tokens_per_s for run in runs]


def _retentions(runs: list[Run]) -> list[float]:
    return [run.times.retention for run in runs]
