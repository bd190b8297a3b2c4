"""What a measurement comes to: medians, ratios within repeats, and whether they reach what is asked. Pure."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.figures import WINDOW, Interval, Spread, agreement, paired
from benchmarks.generate import GENERATE
from benchmarks.measurement import ONE_NODE, PACKED, TWO_NODES, Measurement
from benchmarks.one_process import ONE_PROCESS
from benchmarks.peers import LLAMA_RPC
from benchmarks.systems import Run
from benchmarks.verdict import Verdict

OURS = {GENERATE, ONE_PROCESS, ONE_NODE, TWO_NODES, PACKED}  # all others are peers
TARGETS = {
    "decode_speed": 1.3,
    "retention": 0.95,
    "two_nodes_by_one_process": 0.97,
    "two_nodes_by_one_node": 0.97,
    "packed_by_generate": 2.5,
    f"packed_by_{LLAMA_RPC}": 1.0,
}
"""Least that a ratio has to reach; of models of random weights the decode speed alone is asked less of."""
RANDOM_SPEED_TARGET = 0.9


def targets(found: Measurement) -> dict[str, float]:
    """Those for what was measured."""
    asked = TARGETS | ({"decode_speed": RANDOM_SPEED_TARGET} if found.model.random else {})
    return {name: target for name, target in asked.items() if name in comparisons(found)}


NAMED = {
    "decode_speed": f"decode speed of {TWO_NODES}, by {GENERATE}'s",
    "retention": f"kept from the first {WINDOW} to the last, by what {GENERATE} keeps",
}


def verdicts(found: Measurement) -> dict[str, Verdict]:
    """What is asked of the comparisons, by their keys."""
    intervals = comparisons(found)
    return {
        key: Verdict(NAMED.get(key, key.replace("_", " ")), intervals[key], target)
        for key, target in targets(found).items()
    }


def comparisons(found: Measurement) -> dict[str, Interval]:
    """Ratios within each repeat: ours by ``generate()``'s and by every other system's decode speed."""
    runs = found.runs
    theirs, ours = runs[GENERATE], runs[TWO_NODES]
    result = {
        "decode_speed": _by(_speeds(ours), _speeds(theirs)),
        "retention": _by(_retentions(ours), _retentions(theirs)),
        "first_token_time": _by([run.times.ttft_s for run in ours], [run.times.ttft_s for run in theirs]),
    }
    if ONE_PROCESS in runs:
        result["two_nodes_by_one_process"] = _by(_speeds(ours), _speeds(runs[ONE_PROCESS]))
        result["one_process_by_generate"] = _by(_speeds(runs[ONE_PROCESS]), _speeds(theirs))
    if ONE_NODE in runs:
        result["two_nodes_by_one_node"] = _by(_speeds(ours), _speeds(runs[ONE_NODE]))
        result["one_node_by_generate"] = _by(_speeds(runs[ONE_NODE]), _speeds(theirs))
    if PACKED in runs:
        result["packed_by_generate"] = _by(_speeds(runs[PACKED]), _speeds(theirs))
    for peer in runs:
        if peer not in OURS:
            result[f"two_nodes_by_{peer}"] = _by(_speeds(ours), _speeds(runs[peer]))
            if PACKED in runs:
                result[f"packed_by_{peer}"] = _by(_speeds(runs[PACKED]), _speeds(runs[peer]))
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
                "ttft_s": Interval.of(run.times.ttft_s for run in runs).to_json(),
                "tokens_per_s": Interval.of(run.times.tokens_per_s for run in runs).to_json(),
                "first_window": Interval.of(run.times.first_window for run in runs).to_json(),
                "last_window": Interval.of(run.times.last_window for run in runs).to_json(),
                "retention": Interval.of(run.times.retention for run in runs).to_json(),
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
        "targets": targets(found),
        "verdicts": {key: verdict.to_json() for key, verdict in verdicts(found).items()},
        "absent": found.absent,
        "busy_elsewhere": max(run.facts["busy_elsewhere"] for runs in found.runs.values() for run in runs),
    }


def window_medians(runs: list[Run]) -> list[float]:
    """Tokens per second of each whole window, the median over the repeats."""
    return [median(values) for values in zip(*(run.times.windows() for run in runs), strict=False)]


def _by(ours: list[float], theirs: list[float]) -> Interval:
    return Interval.of(paired(ours, theirs))


def _speeds(runs: list[Run]) -> list[float]:
    return [run.times.tokens_per_s for run in runs]


def _retentions(runs: list[Run]) -> list[float]:
    return [run.times.retention for run in runs]
