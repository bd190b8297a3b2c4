"""`meshnet verify`: whether a model answers alike on this machine however it is cut. One process, no mesh."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Annotated

import typer

from meshnet_cli import options
from meshnet_cli.complaint import FAILURE, say
from meshnet_cli.node_shards import WeightsWanted
from meshnet_cli.progress import ProgressReporter, progress_reporter
from meshnet_core.errors import InvalidInputError, UnsupportedModelError

if TYPE_CHECKING:
    from meshnet_node.model_files import ModelFiles
    from meshnet_node.verification import Verification

TEXTS = (
    "The sky is blue because",
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n    return",
    """Several machines that people own, none of which can hold a whole language model, answer one chat together. Each
holds some layers: 0-20 on the desk, 21-23 in the cellar. « Où est la bibliothèque ? » 你好, 世界! 3.14159, 2.71828. A
cache may vanish at any time, on any of them, and the answer must never change because of it. Therefore""",
)
"""Short, and unlike each other; the longest fills more than one of the chunks that are checked."""

RANDOM_LENGTHS = (5, 30, 90)  # of prompts for a model without a tokenizer
MIN_TOKENS = 2  # as the node's verification has it, which is imported late


def verify(
    model: options.Model,
    splits: Annotated[
        str,
        typer.Option(
            "--splits",
            metavar="SPLITS",
            help="sample (a cut of each kind), all (every cut in two, and more), or your own: 0-14,15-29|0-19,10-29.",
        ),
    ] = "sample",
    tokens: Annotated[
        int, typer.Option("--tokens", min=MIN_TOKENS, metavar="N", help="Tokens of each answer that is compared.")
    ] = 16,
    dtype: options.Dtype = options.DtypeChoice.AUTO,
    quantize: options.Quantize = options.QuantizeChoice.AUTO,
    compile_: options.Compile = options.CompileChoice.AUTO,
    device: options.Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of the table.")] = False,
) -> None:
    """Check that MODEL answers alike on this machine, cut or whole, cached or not, disturbed or not."""
    with progress_reporter() as report:
        report("", f"opening {model}", 0, 1)
        weights = WeightsWanted(dtype.value, quantize.value, compile_.value)
        files, found = _verify(model, splits, tokens, weights, device, report)
    from meshnet_cli import verify_report

    if as_json:
        print(json.dumps(verify_report.document(files.name, files.fingerprint, found), indent=2))
        say(found.verdict)
    else:
        verify_report.show(files.name, found)
    if found.differing:
        raise typer.Exit(FAILURE)


def _verify(
    model: str, splits: str, tokens: int, weights: WeightsWanted, device: str, report: ProgressReporter
) -> tuple[ModelFiles, Verification]:
    from meshnet_node.model_files import open_model
    from meshnet_node.split import parse_splits

    files = open_model(model).rounded(weights.quantize)
    chosen = parse_splits(splits, files.num_layers)
    prompts = _prompts(files, tokens)

    report("", "starting torch", 0, 1)
    import torch

    from meshnet_core.layer_range import LayerRange
    from meshnet_node import verification
    from meshnet_node.compile_choice import compiles_steps, takes_kernels
    from meshnet_node.device_choice import choose_device, choose_dtype, dtype_name
    from meshnet_node.step_compiler import compile_in_child
    from meshnet_node.weight_choice import keeps_packed

    compiled = compiles_steps(weights.compile, choose_device(device))
    prepared = choose_dtype(weights.dtype, choose_device(device), torch.bfloat16)  # as `meshnet node` has it
    folder = files.prepare(
        LayerRange(0, files.num_layers),
        dtype=dtype_name(prepared),
        packed=keeps_packed(weights.quantize, choose_device(device), prepared),
        progress=lambda what, done, total: report("", what, done, total),
    )
    found = verification.verify(
        folder,
        chosen,
        prompts,
        tokens=tokens,
        dtype=weights.dtype,
        device=device,
        quantize=weights.quantize,
        compile_layers=compile_in_child if compiled else None,
        kernels=takes_kernels(weights.compile),
        progress=lambda what, done, total: report("", what, done, total),
    )
    return files, found


def _prompts(files: ModelFiles, tokens: int) -> list[tuple[int, ...]]:
    """The built-in texts in the model's tokens, or ids drawn with a fixed seed where it has no tokenizer; cut so that
    the answer fits into the model's positions.

    Raises:
        InvalidInputError: it does not fit.
    """
    vocabulary = _vocab_size(files)
    try:
        encoded = _encoded(files, vocabulary)
        say(f"prompts are {len(TEXTS)} texts of {_listed(encoded)} tokens")
    except UnsupportedModelError as error:
        draw = random.Random(0)  # noqa: S311 - any ids will do, the same each time
        encoded = [tuple(draw.randrange(vocabulary) for _ in range(length)) for length in RANDOM_LENGTHS]
        say(f"prompts are random ids, {_listed(encoded)} of them ({error.message})")
    if files.max_positions is None:
        return encoded
    if (room := files.max_positions - tokens) < 1:
        raise InvalidInputError(
            f"--tokens {tokens} leaves no position for a prompt; {files.name} has {files.max_positions}"
        )
    return [ids[:room] for ids in encoded]


def _encoded(files: ModelFiles, vocabulary: int) -> list[tuple[int, ...]]:
    """The built-in texts in the model's tokens.

    Raises:
        UnsupportedModelError: it has no tokenizer that could be used.
    """
    from meshnet_gateway.text_model import TextModel

    text_model = TextModel.from_files(files.name, files.fingerprint, files.text_files())
    encoded = [text_model.encode(text) for text in TEXTS]
    # Without a vocabulary file, transformers makes a tokenizer of some families all the same, and it knows no token.
    if not all(encoded) or max(map(max, encoded)) >= vocabulary:
        raise UnsupportedModelError(f"the tokenizer files of {files.name} do not fit the model")
    return encoded


def _vocab_size(files: ModelFiles) -> int:
    config = files.config.get("text_config") or files.config
    size = config.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise UnsupportedModelError(f"the config.json of {files.name} says no vocab_size")
    return size


def _listed(prompts: list[tuple[int, ...]]) -> str:
    return ", ".join(str(len(ids)) for ids in prompts)
