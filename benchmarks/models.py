"""The models that are measured: the real SmolLM2, and two of random weights, made on the spot.

A random-weight model of the exact shape of a real one takes the same time per token; what it writes means nothing, and
every output says that it is random. This module imports no torch; the weights are drawn by `checkpoints`, in a
process of its own, so that who drives a measurement stays as small as a gateway.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

PROMPT_TOKENS = 26
CHATML = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
QUESTION = "Explain in a few paragraphs why the sky is blue and sunsets are red."


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model that can be measured.

    Attributes:
        key: its name on the command line.
        title: what it is, for people.
        splits: layers of the two nodes, inclusive.
        shape: config of a random-weight model; None for a real one.
        model_type: transformers' name of the family of a random-weight model.
    """

    key: str
    title: str
    splits: tuple[str, ...]
    model_type: str = ""
    shape: dict[str, Any] | None = None

    @property
    def random(self) -> bool:
        return self.shape is not None


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that is ready on disk.

    Attributes:
        model: MODEL for a node.
        name: what the mesh calls it.
        folder: a Hugging Face folder of the whole model, in ``dtype`` where it was converted.
        prompt: token ids.
        gguf: the GGUF file that it comes from; None where it is none.
        tensors: name and bytes of each tensor of that file.
        texts: a folder of the tokenizer's and config's files; None where there is no tokenizer.
    """

    model: str
    name: str
    folder: str
    prompt: tuple[int, ...]
    gguf: str | None = None
    tensors: tuple[tuple[str, int], ...] = ()
    texts: str | None = None


QWEN2_SHAPE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
"""Qwen2.5-0.5B's own config.json."""

# Weights read for one token, as in the model above: 15 M a layer (8.4 M linear or 7.3 M full attention, eight experts
# of 0.79 M and a shared one), and an output projection of 134 M.
QWEN3_5_MOE_SHAPE: dict[str, Any] = {
    "vocab_size": 131072,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}

MODELS: dict[str, BenchModel] = {
    model.key: model
    for model in (
        BenchModel("smollm2", "SmolLM2-135M-Instruct (real weights)", ("0-14", "15-29")),
        BenchModel(
            "qwen2-0.5b", "Qwen2.5-0.5B's shape (random weights)", ("0-20", "21-23"), "qwen2", shape=QWEN2_SHAPE
        ),
        BenchModel(
            "qwen3.5-moe",
            "a small Qwen3.5-MoE: 18 linear and 6 full attention layers, 8 of 32 experts (random weights)",
            ("0-11", "12-23"),
            "qwen3_5_moe_text",
            shape=QWEN3_5_MOE_SHAPE,
        ),
    )
}


def random_prompt(vocabulary: int, length: int = PROMPT_TOKENS, seed: int = 0) -> tuple[int, ...]:
    """Token ids that mean nothing, the same on every machine."""
    return tuple(random.Random(seed).choices(range(vocabulary), k=length))


def prepare(model: BenchModel, dtype: str) -> PreparedModel:
    """Make or convert what is missing, in a process of its own; takes up to a minute the first time.

    Raises:
        RuntimeError: that process failed; it has said why.
    """
    command = [sys.executable, "-m", "benchmarks.models", model.key, "--dtype", dtype]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{model.key} could not be prepared (exit code {done.returncode})")
    found = json.loads(done.stdout.splitlines()[-1])
    tensors = tuple((name, nbytes) for name, nbytes in found.pop("tensors"))
    return PreparedModel(**{**found, "prompt": tuple(found["prompt"]), "tensors": tensors})


def _prepare_here(model: BenchModel, dtype: str) -> PreparedModel:
    from meshnet_core.layer_range import LayerRange  # noqa: PLC0415  these bring torch, and only this process needs it
    from meshnet_node.model_files import open_model  # noqa: PLC0415

    if model.shape is not None:
        from benchmarks.checkpoints import random_folder  # noqa: PLC0415

        folder = random_folder(model.key, model.model_type, model.shape)
        return PreparedModel(str(folder), folder.name, str(folder), random_prompt(model.shape["vocab_size"]))
    from tokenizers import Tokenizer  # noqa: PLC0415

    from benchmarks.checkpoints import one_file_folder, text_folder  # noqa: PLC0415
    from meshnet_node.gguf_conversion import GgufConversion  # noqa: PLC0415
    from meshnet_node.gguf_header import read_gguf_header  # noqa: PLC0415

    files = open_model(model.key)
    whole = one_file_folder(files.prepare(LayerRange(0, files.num_layers), dtype=dtype))
    texts = files.text_files()
    tokenizer = Tokenizer.from_str(texts["tokenizer.json"].decode())
    prompt = tokenizer.encode(CHATML.format(QUESTION), add_special_tokens=False).ids
    if not isinstance(files.source, GgufConversion):
        raise TypeError(f"{model.key} is no GGUF file but {files.source!r}")
    header = read_gguf_header(files.source.path)
    return PreparedModel(
        model.key,
        files.name,
        str(whole),
        tuple(prompt),
        gguf=str(files.source.path),
        tensors=tuple((tensor.name, tensor.nbytes) for tensor in header.tensors.values()),
        texts=str(text_folder(files.name, texts)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a model of the benchmarks ready; prints where it lies.")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    arguments = parser.parse_args()
    print(json.dumps(asdict(_prepare_here(MODELS[arguments.model], arguments.dtype))))


if __name__ == "__main__":
    main()
