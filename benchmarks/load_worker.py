"""Loads one shard in a fresh process and prints, as JSON, what that read, held and cost. Started by `loading`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints import gguf_file, random_folder
from benchmarks.memory import bytes_read, peak_rss
from benchmarks.models import MODELS, BenchModel
from meshnet_core.layer_range import LayerRange
from meshnet_node.gguf_conversion import GgufConversion
from meshnet_node.gguf_header import read_gguf_header
from meshnet_node.model_files import open_model
from meshnet_node.shard_loader import load_shard
from meshnet_node.tensor_index import index_folder

IMPORTED_AHEAD = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.modeling_gguf_pytorch_utils",
    "meshnet_node.gguf_tensor_map",
    "meshnet_node.gguf_text",
)
"""What loading would import on its way: modules read from disk are no part of the model."""


def load(model: BenchModel, source: str, layers: LayerRange, dtype: str, cache: Path) -> dict[str, Any]:
    """Load, and tell.

    ``read_bytes`` are the tensors' bytes as loader and converter count them while reading the model's own file;
    ``system_read_bytes`` what the kernel counted for the whole process meanwhile, headers, tokenizer and the converted
    files included. ``model_bytes`` and ``model_held_bytes`` are the whole model's, on disk and in memory in ``dtype``.
    ``opening_peak_bytes`` and ``peak_bytes`` are the most memory beyond ``idle_bytes``, which this process held before:
    while the model was opened, which makes a GGUF's tokenizer into files the first time, and while it was converted and
    loaded after that.
    """
    path, model_bytes, parameters = _whole(model, source)
    counted = {"read": 0}

    def count(done: int, _total: int) -> None:
        counted["read"] = done

    for name in IMPORTED_AHEAD:
        importlib.import_module(name)
    idle = _forget_peak()
    read_before, began = bytes_read(), time.perf_counter()
    files = open_model(path, cache_dir=cache)
    opened, opening_peak = time.perf_counter(), peak_rss(os.getpid())
    _forget_peak()
    folder = files.prepare(layers, dtype=dtype, progress=lambda _what, done, total: count(done, total))
    prepared = time.perf_counter()
    converted_bytes = counted["read"]  # of the GGUF; what follows reads the converted files
    shard = load_shard(folder, layers, dtype=dtype, device="cpu", progress=count)
    loaded = time.perf_counter()
    peak, read_after = peak_rss(os.getpid()), bytes_read()
    return {
        "model_bytes": model_bytes,
        "model_held_bytes": parameters * getattr(torch, dtype).itemsize,
        "read_bytes": converted_bytes if source == "gguf" else counted["read"],
        "held_bytes": shard.weight_bytes,
        "system_read_bytes": None if read_before is None or read_after is None else read_after - read_before,
        "idle_bytes": idle,
        "opening_peak_bytes": None if idle is None or opening_peak is None else opening_peak - idle,
        "peak_bytes": None if idle is None or peak is None else peak - idle,
        "seconds": {
            "open": round(opened - began, 2),
            "convert": round(prepared - opened, 2),
            "load": round(loaded - prepared, 2),
        },
    }


def _whole(model: BenchModel, source: str) -> tuple[str, int, int]:
    """MODEL, and bytes and numbers of all its tensors."""
    if model.shape is None:
        if source != "gguf":
            raise ValueError(f"{model.key} comes as GGUF alone")
        conversion = open_model(model.key).source
        if not isinstance(conversion, GgufConversion):
            raise TypeError(f"{model.key} is no GGUF file but {conversion!r}")
        path = conversion.path
    else:
        folder = random_folder(model.key, model.model_type, model.shape)
        if source == "safetensors":
            tensors = [entry for _, entry in index_folder(folder).values()]
            return str(folder), sum(entry.nbytes for entry in tensors), sum(_count(entry.shape) for entry in tensors)
        path = gguf_file(folder)
    header = read_gguf_header(path)
    entries = header.tensors.values()
    return str(path), sum(entry.nbytes for entry in entries), sum(_count(entry.shape) for entry in entries)


def _count(shape: tuple[int, ...]) -> int:
    number = 1
    for size in shape:
        number *= size
    return number


def _forget_peak() -> int | None:
    """Start counting the peak anew from what is held now, which is returned; None where the system does not tell."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "ascii")
    return peak_rss(os.getpid())


def main() -> None:
    parser = argparse.ArgumentParser(description="Loads one shard; started by the benchmarks.")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("source", choices=("safetensors", "gguf"))
    parser.add_argument("layers")
    parser.add_argument("--dtype", required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="meshnet-loading-") as cache:
        found = load(MODELS[given.model], given.source, LayerRange.parse(given.layers), given.dtype, Path(cache))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
