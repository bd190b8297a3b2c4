"""Checkpoints that the benchmarks need, made once and kept in the cache folder: of random weights, or put together.

Knows no shapes; they are given.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from meshnet_node.cache_folder import default_cache_dir

SEED = 0
_RECIPE = 1  # part of a random folder's name: raise it when the same shape would be drawn differently


def random_folder(key: str, model_type: str, shape: dict[str, Any]) -> Path:
    """A Hugging Face folder of that shape in bfloat16, without a tokenizer; drawn when first asked for."""
    stamp = hashlib.sha256(json.dumps([_RECIPE, SEED, model_type, shape], sort_keys=True).encode()).hexdigest()[:8]
    return _made_once(f"random-{key}-{stamp}", lambda folder: _draw(model_type, shape, folder))


def one_file_folder(parts: Path) -> Path:
    """The model of a folder of layer files as transformers itself wants it: one file, named as it expects.

    Args:
        parts: what converting a GGUF gave: ``config.json`` and ``*.safetensors`` without an index.
    """

    def join(folder: Path) -> None:
        folder.mkdir(parents=True)
        tensors: dict[str, torch.Tensor] = {}
        for part in sorted(parts.glob("*.safetensors")):
            tensors |= load_file(part)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        shutil.copy(parts / "config.json", folder)

    return _made_once(f"whole-{parts.parent.name}-{parts.name}", join)


def text_folder(name: str, texts: Mapping[str, bytes]) -> Path:
    """A model's tokenizer, templates and config as files, for whoever reads them from a folder."""

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        for file, content in texts.items():
            (folder / file).write_bytes(content)

    return _made_once(f"texts-{name}", write)


def gguf_file(folder: Path) -> Path:
    """A random-weight qwen2 folder as one GGUF file, see `random_gguf`."""
    from benchmarks.random_gguf import write_qwen2_gguf  # noqa: PLC0415  needs gguf, which else only a node does

    name = f"gguf-{folder.name}"

    def write(made: Path) -> None:
        made.mkdir(parents=True)
        write_qwen2_gguf(folder, made / f"{folder.name}.gguf")

    return _made_once(name, write) / f"{folder.name}.gguf"


def _made_once(name: str, make: Callable[[Path], None]) -> Path:
    folder = default_cache_dir() / "benchmarks" / name
    if not folder.is_dir():
        print(f"making {name}, once", file=sys.stderr, flush=True)
        partial = folder.with_name(f".{name}.{os.getpid()}")
        make(partial)
        try:
            partial.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(partial)
    return folder


def _draw(model_type: str, shape: dict[str, Any], folder: Path) -> None:
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(model_type, **shape)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.generation_config.eos_token_id = None  # an answer ends at its length alone
    model.save_pretrained(folder)
