"""A shard's decode step, plain and compiled, in one process: time of each, warm-up, memory.

    python -m benchmarks.compiled_step [--model smollm2] [--dtype bfloat16] [--layers 0-14] [--threads 1] [--rounds 7]

Rounds of plain and compiled steps are interleaved, after 32 and after 1,000 positions; what is told is the median of a
round's steps, then the median of the rounds with their range. The warm-up begins with an empty folder of libraries, so
that it compiles. Prints a table, then one line of JSON. Exit code 1 where the compiled step is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LENGTHS = (32, 1000)
STEPS = 24


def main() -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled_step", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", help="such as 0-14; all if not given")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # read once, when torch is imported
    found = measure(arguments)
    print(json.dumps(found))
    return 0 if found["state"] == "ready" else 1


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One shard's figures, JSON-ready; prints them as it goes."""
    import torch  # noqa: PLC0415 - once the number of threads is known

    from benchmarks.models import MODELS, prepare  # noqa: PLC0415
    from meshnet_core.layer_range import LayerRange  # noqa: PLC0415
    from meshnet_node.shard_loader import load_shard, read_config  # noqa: PLC0415
    from meshnet_node.step_warm_up import StepWarmUp  # noqa: PLC0415

    torch.set_num_threads(arguments.threads)
    folder = Path(prepare(MODELS[arguments.model], arguments.dtype).folder)
    total = read_config(folder).num_hidden_layers
    layers = LayerRange.parse(arguments.layers) if arguments.layers else LayerRange(0, total)
    shard = load_shard(folder, layers, dtype=arguments.dtype, device=arguments.device)
    before = _resident()
    with tempfile.TemporaryDirectory(prefix="meshnet-compiled-") as place:
        os.environ["MESHNET_CACHE"] = place
        seconds = []
        for _ in range(2):  # compiled, then from the folder
            began = time.monotonic()
            warm_up = StepWarmUp(shard, is_worth=lambda _found: True)
            warm_up.run()
            seconds.append(time.monotonic() - began)
        kept = sum(path.stat().st_size for path in Path(place).rglob("*.pt2"))
    result = {
        "benchmark": "compiled-step",
        "model": arguments.model,
        "layers": str(layers),
        "dtype": shard.dtype,
        "device": shard.device,
        "threads": arguments.threads,
        "state": warm_up.status.state.value,
        "detail": warm_up.status.detail,
        "warm_up_s": round(seconds[0], 1),
        "second_warm_up_s": round(seconds[1], 1),
        "child_peak_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
        "node_grew_mib": (_resident() - before) // 2**20,
        "library_mib": round(kept / 2**20, 1),
        "steps": [],
    }
    print(
        f"{arguments.model} layers {layers}, {shard.dtype} on {shard.device}, {arguments.threads} threads: "
        f"{result['state']} {result['detail']}, {seconds[0]:.1f} s, then {seconds[1]:.1f} s from the folder",
        flush=True,
    )
    for length in LENGTHS if result["state"] == "ready" else ():
        result["steps"].append(_compare(shard.whole_view(), length, arguments.rounds))
    return result


def _compare(view: Any, length: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step after ``length`` positions."""
    import torch  # noqa: PLC0415

    step = view.step
    device = next(view.plain_layers.parameters()).device
    if view.layers.start:
        inputs = torch.randn(1, 1, view.config.hidden_size, dtype=view.model.dtype, device=device)
    else:
        inputs = torch.tensor([[7]], device=device)
    taken: dict[str, list[float]] = {"plain": [], "compiled": []}
    with torch.inference_mode():
        cache = view.new_cache()
        for at in range(0, length, 200):
            many = inputs.repeat_interleave(min(200, length - at), dim=1)
            view.forward(many, position=at, cache=cache, sample=0, cancelled=lambda: False)
        position = length
        for _ in range(rounds):
            for name, through in (("plain", None), ("compiled", step)):
                view.step = through
                times = []
                for _ in range(STEPS):
                    began = time.perf_counter()
                    output = view.forward(
                        inputs, position=position, cache=cache, sample=int(view.is_last), cancelled=lambda: False
                    )
                    output.cpu()  # so that a GPU is waited for
                    times.append(1000 * (time.perf_counter() - began))
                    position += 1
                taken[name].append(statistics.median(times))
    view.step = step
    ratios = [plain / compiled for plain, compiled in zip(taken["plain"], taken["compiled"], strict=True)]
    found = {
        "length": length,
        "plain_ms": round(statistics.median(taken["plain"]), 2),
        "compiled_ms": round(statistics.median(taken["compiled"]), 2),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_low": round(min(ratios), 3),
        "ratio_high": round(max(ratios), 3),
    }
    print(
        f"after {length:>5} positions: plain {found['plain_ms']} ms, compiled {found['compiled_ms']} ms, "
        f"ratio {found['ratio']} ({found['ratio_low']}-{found['ratio_high']} over {rounds} rounds)",
        flush=True,
    )
    return found


def _resident() -> int:
    import psutil  # noqa: PLC0415

    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    sys.exit(main())
