"""`make gpu-check`: parity and flat speed on a CUDA device, for a machine with this checkout and no registries.

    python -m benchmarks.gpu_check [--only parity|speed|compile] [--all-families] [--rehearse]

Float32 parity of two nodes, both on the GPU, and one on the GPU and one on the CPU, on tiny models of several families
and on Qwen2.5-0.5B's shape; then the speed of two nodes on the GPU over 512 tokens beside `generate()`. Takes some
minutes. `--only compile`, which is no part of the rest and needs a C++ compiler, compares compiled decode steps of some
tiny families with plain ones, and times them on Qwen2.5-0.5B's shape. `PACKAGES` below is what it needs.

Exit code: 0 all holds, 1 something does not, 3 there is no CUDA device (nothing was checked), 4 a package is missing or
of a version that was never tested. `--rehearse` goes through all of it on the CPU, which checks nothing about a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

TRANSFORMERS = "5.24."
PACKAGES = ("torch", "transformers", "safetensors", "aiohttp", "psutil", "prometheus_client", "typer", "rich", "gguf")
PARITY_TOKENS = 64
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "lfm2",
    "gemma3_text",
)
COMPILED_FAMILIES = ("llama", "mistral", "qwen3_next", "lfm2")
SPEED_TOKENS = 512
MODEL = "qwen2-0.5b"
RETENTION_TARGET = 0.95
NOT_RUN, UNFIT = 3, 4


def unfit() -> str | None:
    """What this Python lacks for the check; None if nothing."""
    for package in PACKAGES:
        try:
            importlib.import_module(package)
        except ImportError as error:
            return f"this Python lacks {package}: {error}"
    found = metadata.version("transformers")
    if not found.startswith(TRANSFORMERS):
        return f"this Python has transformers {found}; nodes are tested with {TRANSFORMERS}x alone"
    return None


def describe_device() -> str | None:
    """The GPU's name and torch's version; None where torch sees no CUDA device."""
    import torch  # noqa: PLC0415  only once it is known to be there

    if not torch.cuda.is_available():
        return None
    return f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def check_parity(
    devices: tuple[tuple[str, str], ...], tokens: int, families: tuple[str, ...] | None
) -> list[dict[str, Any]]:
    """A row for each model and pair of devices; prints each as it comes.

    Args:
        devices: of the two nodes.
        tokens: to compare.
        families: of the tiny models; None for all that the tests know.
    """
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    import tiny_models  # noqa: PLC0415  what the tests draw
    from benchmarks.checkpoints import random_folder  # noqa: PLC0415
    from benchmarks.models import MODELS, random_prompt  # noqa: PLC0415
    from benchmarks.parity import compare  # noqa: PLC0415
    from meshnet_core.layer_range import LayerRange  # noqa: PLC0415

    logging: Any = transformers.utils.logging  # untyped
    logging.disable_progress_bar()
    torch.backends.cuda.matmul.allow_tf32 = False  # 10 bits of mantissa would not be float32
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    rows: list[dict[str, Any]] = []

    def compare_on_all(name: str, folder: Path, splits: list[LayerRange], prompt: tuple[int, ...]) -> None:
        for pair in devices:
            began = time.monotonic()
            found = asyncio.run(compare(folder, splits, pair, prompt, tokens))
            where, took = "+".join(pair), time.monotonic() - began
            print(f"{'holds' if found.holds else 'FAILS'}: {name} on {where}: {found}, {took:.1f} s", flush=True)
            rows.append(
                {
                    "model": name,
                    "devices": list(pair),
                    "holds": found.holds,
                    "tokens": found.tokens,
                    "excused": found.excused,
                    "wrong": found.wrong,
                    "worst_logprob_difference": found.worst,
                }
            )

    for family in families or tuple(tiny_models.FAMILIES):
        with tempfile.TemporaryDirectory(prefix="meshnet-gpu-check-") as place:
            folder = tiny_models.save_tiny(family, Path(place))
            layers = tiny_models.num_layers(family)
            splits = [LayerRange(0, layers // 2), LayerRange(layers // 2, layers)]
            compare_on_all(f"tiny {family}", folder, splits, random_prompt(tiny_models.VOCAB, 17))
    model = MODELS[MODEL]
    if model.shape is not None:
        folder = random_folder(model.key, model.model_type, model.shape)
        prompt = random_prompt(model.shape["vocab_size"])
        compare_on_all(model.title, folder, [LayerRange.parse(split) for split in model.splits], prompt)
    return rows


def check_speed(device: str, tokens: int) -> dict[str, Any]:
    """Two nodes beside ``generate()``, in bfloat16; the bench's own JSON form."""
    from rich.console import Console  # noqa: PLC0415

    from benchmarks.measurement import Plan, measure  # noqa: PLC0415
    from benchmarks.mesh_processes import default_threads  # noqa: PLC0415
    from benchmarks.models import MODELS, prepare  # noqa: PLC0415
    from benchmarks.summary import document  # noqa: PLC0415
    from benchmarks.table import print_tables  # noqa: PLC0415

    plan = Plan(
        dtype="bfloat16",
        device=device,
        threads=default_threads(),
        new_tokens=tokens,
        repeats=2,
        stateless_lengths=(0, tokens // 2),
        one_process=False,
        one_node=False,
        packed=False,
    )
    model = MODELS[MODEL]
    found = asyncio.run(measure(model, prepare(model, plan.dtype), plan, lambda what: print(what, flush=True)))
    print_tables(found, Console(width=140))
    return document(found)


def check_compile(device: str) -> list[dict[str, Any]]:
    """A row for each tiny family, and one with times for Qwen2.5-0.5B's shape; prints each as it comes."""
    import tiny_models  # noqa: PLC0415
    from benchmarks.compiled_step import measure  # noqa: PLC0415
    from meshnet_core.layer_range import LayerRange  # noqa: PLC0415
    from meshnet_node.shard_loader import load_shard  # noqa: PLC0415
    from meshnet_node.step_warm_up import StepWarmUp  # noqa: PLC0415

    rows: list[dict[str, Any]] = []
    for family in COMPILED_FAMILIES:
        with tempfile.TemporaryDirectory(prefix="meshnet-gpu-check-") as place:
            folder = tiny_models.save_tiny(family, Path(place))
            layers = LayerRange(0, tiny_models.num_layers(family))
            warm_up = StepWarmUp(
                load_shard(folder, layers, dtype="float32", device=device), is_worth=lambda _found: True
            )
            warm_up.run()
        status = warm_up.status
        holds = status.state.value == "ready"
        print(f"{'holds' if holds else 'FAILS'}: compiled steps of tiny {family}: {status.detail}", flush=True)
        rows.append({"model": family, "holds": holds, "detail": status.detail, "seconds": round(status.seconds, 1)})
    wanted = argparse.Namespace(model=MODEL, dtype="bfloat16", device=device, layers=None, threads=1, rounds=5)
    found = measure(wanted)
    rows.append({"model": MODEL, "holds": found["state"] == "ready", **found})
    return rows


def main() -> int:
    """Check, and print a JSON line as the last; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=("parity", "speed", "compile"), help="one part alone")
    parser.add_argument("--all-families", action="store_true", help="parity of every family that the tests know")
    parser.add_argument("--rehearse", action="store_true", help="go through it on the CPU: checks no GPU")
    arguments = parser.parse_args()
    if (reason := unfit()) is not None:
        print(f"gpu-check was not run: {reason}", file=sys.stderr)
        return UNFIT
    device = describe_device()
    if device is None and not arguments.rehearse:
        print("gpu-check was not run: torch sees no CUDA device on this machine", file=sys.stderr)
        return NOT_RUN
    began = time.monotonic()
    on = "cpu" if arguments.rehearse else "cuda"
    print("a rehearsal on the CPU: no GPU is checked" if arguments.rehearse else device, flush=True)
    pairs = (("cpu", "cpu"),) if arguments.rehearse else (("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda"))
    parity, speed, compiled = [], None, []
    if arguments.only in (None, "parity"):
        families = None if arguments.all_families else FAMILIES
        parity = check_parity(pairs, 16 if arguments.rehearse else PARITY_TOKENS, families)
    if arguments.only in (None, "speed"):
        speed = check_speed(on, 60 if arguments.rehearse else SPEED_TOKENS)
    if arguments.only == "compile":
        compiled = check_compile(on)
    same = all(row["holds"] for row in compiled)
    flat = speed is None or speed["ratios"]["retention"]["median"] >= RETENTION_TARGET
    holds = all(row["holds"] for row in parity)
    from benchmarks.results import publish  # noqa: PLC0415

    result = {
        "benchmark": "gpu-check",
        "device": "none: a rehearsal on the CPU" if arguments.rehearse else device,
        "seconds": round(time.monotonic() - began, 1),
        "parity_holds": holds,
        "speed_is_flat": flat,
        "parity": parity,
        "speed": speed,
        "compiled_is_same": same,
        "compiled": compiled,
    }
    publish("gpu-check", result, line=True)
    return 0 if holds and flat and same else 1


if __name__ == "__main__":
    sys.exit(main())
