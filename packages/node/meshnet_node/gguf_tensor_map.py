"""From the tensors of a GGUF file to those of a Hugging Face checkpoint: names, shapes and values, one at a time.

Which name belongs to which, and how llama.cpp's layout is undone (the q/k permutation, norms stored as ``w + 1``, fused
experts), is transformers' own knowledge and is taken from it: the name map and tensor processors of
``transformers.modeling_gguf_pytorch_utils``, and for the architectures that transformers has moved on, the weight
conversions of ``transformers.integrations.gguf``. Here they are applied to single tensors instead of a whole file, and
what they would drop in silence is refused. Knows nothing of caches and output files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from meshnet_core.errors import UnsupportedModelError
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS, ConcatenateRows
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_SUPPORTED_ARCHITECTURES,
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from meshnet_node.gguf_header import GgufHeader, GgufTensor
    from transformers import PretrainedConfig

    Array = np.ndarray[Any, np.dtype[Any]]
    Convert = Callable[[list[Array]], Array]

EMBED, HEAD = "embed", "head"
_BLOCK_BYTES = 16 << 20  # de-quantised at a time where rows are independent
_LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")
_EXPERTS = re.compile(r"(blk\.\d+\.ffn_(gate|up|down)_exps)\.weight")
_EMBED_SOURCES = ("token_embd.", "position_embd.", "token_types.")
# What llama.cpp calls an architecture, where transformers' table of readers spells it otherwise.
_ALIASES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """How one checkpoint tensor comes about.

    Attributes:
        name, shape: as in the Hugging Face checkpoint.
        sources: GGUF tensors; several are joined along the second dimension (fused experts).
        convert: whole fp32 sources to the whole fp32 tensor; None where rows are only de-quantised and joined, so that
            a few of them at a time will do.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[GgufTensor, ...]
    convert: Convert | None

    @property
    def source_bytes(self) -> int:
        return sum(source.nbytes for source in self.sources)


def part_name(layer: int) -> str:
    """The part that holds one layer; the others are :data:`EMBED` and :data:`HEAD`."""
    return f"layer-{layer:05d}"


def check_architecture(header: GgufHeader, path: Path) -> None:
    """Refuse, before any work, a file that transformers cannot read or would read wrongly.

    Raises:
        UnsupportedModelError: with the architecture and what would work instead.
    """
    arch, metadata = header.architecture, header.metadata
    known = {*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_ARCHS}
    instead = "use the model's Hugging Face folder or hub id (safetensors) instead"
    if arch not in known and _ALIASES.get(arch) not in known:
        raise UnsupportedModelError(
            f"{path.name} has the architecture {arch}, which transformers cannot read from GGUF; {instead}. "
            f"Readable from GGUF: {', '.join(sorted(known))}"
        )
    if metadata.get("general.type", "model") != "model":
        raise UnsupportedModelError(f"{path.name} is a GGUF of type {metadata['general.type']}, not of a whole model")
    if metadata.get("split.count", 0) > 1:
        raise UnsupportedModelError(
            f"{path.name} is one of {metadata['split.count']} split files; join them first with "
            f"`llama-gguf-split --merge`, or {instead}"
        )
    scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
    if (
        scaling != "none"
        and metadata.get(f"{arch}.rope.scaling.factor", 1.0) != 1.0
        and _ALIASES.get(arch) != "gpt_oss"
    ):
        raise UnsupportedModelError(
            f"{path.name} scales its rotary positions ({scaling}), which transformers drops when it reads {arch} from "
            f"GGUF, so long prompts would go wrong; {instead}"
        )
    for tensor in header.tensors.values():
        _check_block_type(tensor, path)


def _check_block_type(tensor: GgufTensor, path: Path) -> None:
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[tensor.ggml_type][1], np.uint8), tensor.ggml_type)
    except NotImplementedError:
        raise UnsupportedModelError(
            f"{path.name} holds {tensor.name} as {tensor.ggml_type.name}, which cannot be de-quantised here; "
            f"quantise the model another way (Q8_0, Q4_K_M) or use its safetensors"
        ) from None


def plan_tensors(header: GgufHeader, config: PretrainedConfig) -> dict[str, list[TensorPlan]]:
    """What every part of the model is made of: ``embed``, ``layer-00000`` ..., ``head``.

    Builds the model without storage (meta device) to learn its tensors' names and shapes.

    Raises:
        UnsupportedModelError: a tensor of the file has no place in the model, one of the model's is not in the file,
            or a shape differs; nothing is dropped or invented.
    """
    arch = header.architecture
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise UnsupportedModelError(f"a GGUF of {arch} is no causal language model to transformers: {error}") from error
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if getattr(config, "tie_word_embeddings", False):
        expected.pop("lm_head.weight", None)
    plans = _converted_plans(header, config) if arch in GGUF_ARCHS else _processed_plans(header, config, model)
    _check_complete(arch, expected, plans)
    parts: dict[str, list[TensorPlan]] = {}
    for plan in plans:
        if plan.name in expected:  # leaves out a second copy of tied embeddings
            parts.setdefault(_part_of(plan, arch), []).append(plan)
    return parts


def _part_of(plan: TensorPlan, arch: str) -> str:
    if (match := _LAYER.search(plan.name)) is not None:
        return part_name(int(match[1]))
    source = plan.sources[0].name
    # lfm2 calls its final norm token_embd_norm
    if source.startswith(_EMBED_SOURCES) or (source.startswith("token_embd_norm.") and arch != "lfm2"):
        return EMBED
    return HEAD


def _check_complete(arch: str, expected: dict[str, tuple[int, ...]], plans: list[TensorPlan]) -> None:
    planned = {plan.name: plan.shape for plan in plans}
    if missing := sorted(expected.keys() - planned.keys()):
        raise UnsupportedModelError(
            f"this GGUF of {arch} lacks {len(missing)} tensors that transformers' model has, such as {missing[0]}; "
            f"use the model's safetensors instead"
        )
    for name, shape in expected.items():
        if planned[name] != shape:
            raise UnsupportedModelError(
                f"{name} has the shape {list(planned[name])} in this GGUF of {arch} and {list(shape)} in the model "
                f"that transformers builds from its metadata; use the model's safetensors instead"
            )
    if extra := sorted(planned.keys() - expected.keys() - {"lm_head.weight"}):
        raise UnsupportedModelError(f"this GGUF of {arch} has {extra[0]}, which transformers' model has no place for")


def _processed_plans(header: GgufHeader, config: PretrainedConfig, model: torch.nn.Module) -> list[TensorPlan]:
    """Plans by the name map and the tensor processors."""
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=config.to_dict())
    names = get_gguf_hf_weights_map(model, processor)
    plans: list[TensorPlan] = []
    fused: dict[str, list[GgufTensor]] = {}
    for tensor in header.tensors.values():
        if (match := _EXPERTS.fullmatch(tensor.name)) is not None and match[1] in names:
            if match[2] == "down":
                plans.append(TensorPlan(names[match[1]], tensor.shape, (tensor,), None))
            else:
                fused.setdefault(names[match[1]], []).append(tensor)
            continue
        if tensor.name not in names:
            raise UnsupportedModelError(
                f"transformers drops {tensor.name} when it reads a GGUF of {header.architecture}, which could change "
                f"every answer; use the model's safetensors instead"
            )
        plans.append(_processed_plan(tensor, names[tensor.name], processor))
    for name, pair in fused.items():
        pair.sort(key=lambda tensor: "ffn_up" in tensor.name)  # gate first, as transformers fuses them
        plans.append(_joined_plan(name, pair))
    return plans


def _processed_plan(tensor: GgufTensor, name: str, processor: TensorProcessor) -> TensorPlan:
    def convert(sources: list[Array]) -> Array:
        held: dict[str, Any] = {"tensors": {}}
        done = processor.process(weights=sources[0], name=tensor.name, tensor_key_mapping={}, parsed_parameters=held)
        if done.name is None:  # "handled": it put the result there itself
            return np.asarray(held["tensors"][name].numpy())
        return np.asarray(done.weights)

    # Shown an array of the right shape but without storage, a processor tells whether it touches this tensor.
    probe = np.broadcast_to(np.int8(-1), tensor.shape)
    with np.errstate(all="ignore"):
        seen = processor.process(
            weights=probe, name=tensor.name, tensor_key_mapping={}, parsed_parameters={"tensors": {}}
        )
        untouched = seen.weights is probe and seen.name == tensor.name
        shape = tensor.shape if untouched else tuple(convert([probe]).shape)
    return TensorPlan(name, shape, (tensor,), None if untouched else convert)


def _joined_plan(name: str, tensors: list[GgufTensor]) -> TensorPlan:
    first = tensors[0].shape
    rows = sum(tensor.shape[1] for tensor in tensors)
    return TensorPlan(name, (first[0], rows, *first[2:]), tuple(tensors), None)


def _converted_plans(header: GgufHeader, config: PretrainedConfig) -> list[TensorPlan]:
    """Plans by the weight conversions of the newer reader."""
    mapping = GGUF_ARCHS[header.architecture](config)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, tuple[WeightConverter | None, list[tuple[int, GgufTensor]]]] = {}
    for tensor in header.tensors.values():
        name, pattern = rename_source_key(tensor.name, renamings, converters)
        if name.startswith("mtp."):
            continue  # multi-token prediction: a drafting head that the plain model does not run
        converter = by_pattern.get(pattern)
        order = converter.source_patterns.index(pattern) if converter is not None else 0
        found.setdefault(name, (converter, []))[1].append((order, tensor))
    plans = []
    for name, (converter, ranked) in found.items():
        tensors = [tensor for _, tensor in sorted(ranked, key=lambda pair: pair[0])]
        plans.append(_converted_plan(name, tensors, converter))
    return plans


def _converted_plan(name: str, tensors: list[GgufTensor], converter: WeightConverter | None) -> TensorPlan:
    operations = converter.operations if converter is not None else []
    if not operations and len(tensors) == 1:
        return TensorPlan(name, tensors[0].shape, tuple(tensors), None)
    if len(tensors) > 1:
        if len(operations) != 1 or not isinstance(operations[0], ConcatenateRows) or operations[0].dim != 1:
            raise UnsupportedModelError(
                f"no way is known here to join {', '.join(t.name for t in tensors)} into {name}"
            )
        return _joined_plan(name, tensors)

    def convert(sources: list[Array]) -> Array:
        value = torch.from_numpy(sources[0])
        for operation in operations:
            value = operation.convert({name: value}, [name], [name], full_layer_name=name)[name]
        return np.asarray(value.numpy())

    shape = convert([np.zeros(tensors[0].shape, np.float32)]).shape
    return TensorPlan(name, tuple(shape), tuple(tensors), convert)


class TensorReader:
    """Reads and de-quantises tensors of one open GGUF file, by plan; holds about one tensor, or a few rows of it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def values(self, plan: TensorPlan) -> Iterator[Array]:
        """The tensor's fp32 values in row-major order, in blocks of any shape."""
        if plan.convert is not None:
            yield plan.convert([self._whole(source) for source in plan.sources])
            return
        rows = plan.shape[0]
        # Sources that are joined along the second dimension alternate row by row; a lone one goes in larger blocks.
        step = 1 if len(plan.sources) > 1 else max(1, _BLOCK_BYTES * rows // (4 * prod(plan.shape)))
        for start in range(0, rows, step):
            for source in plan.sources:
                yield self._rows(source, start, min(start + step, rows))

    def _whole(self, source: GgufTensor) -> Array:
        values = np.empty(source.shape, np.float32)
        rows = source.shape[0]
        step = max(1, _BLOCK_BYTES * rows // (4 * prod(source.shape)))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            values[start:stop] = self._rows(source, start, stop)
        return values

    def _rows(self, source: GgufTensor, start: int, stop: int) -> Array:
        shape, row_bytes = source.shape, source.nbytes // source.shape[0]
        if len(shape) == 1:  # a vector has no rows to cut at: blocks may span them
            start, stop, row_bytes = 0, 1, source.nbytes
        data = np.empty((stop - start) * row_bytes, np.uint8)
        self._file.seek(source.start + start * row_bytes)
        if self._file.readinto(data.data) != len(data):
            raise UnsupportedModelError(f"the file ended inside {source.name}; was it replaced while being read?")
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(source.ggml_type)]
        last = shape[-1] // block * block_bytes
        values = dequantize(data.reshape(-1, last), source.ggml_type)
        return np.asarray(values, np.float32).reshape(*((stop - start, *shape[1:]) if len(shape) > 1 else shape))
