"""From the tensors of a GGUF file to those of a Hugging Face checkpoint: names, shapes and values, one at a time.

Which name belongs to which, and how llama.cpp's layout is undone (the q/k permutation, norms stored as ``w + 1``, fused
experts), is transformers' own knowledge and is taken from it: the name map and tensor processors of
``transformers.modeling_gguf_pytorch_utils``, and for the architectures that transformers has moved on, the weight
conversions of ``transformers.integrations.gguf``. Here they are applied to single tensors instead of a whole file, and
what they would drop in silence is refused. Knows nothing of caches and output files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS, ConcatenateRows
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from meshnet_core.errors import UnsupportedModelError
from meshnet_node.gguf_blocks import BLOCK_BYTES
from meshnet_node.gguf_moves import BlockMoves, found_moves
from meshnet_node.gguf_rope import ROPE_FACTORS
from meshnet_node.gguf_support import USE_SAFETENSORS
from meshnet_node.gguf_values import GgufValues, rows_at_a_time
from meshnet_node.packable_modules import packable_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PretrainedConfig

    from meshnet_node.gguf_header import GgufHeader, GgufTensor

    Array = np.ndarray[Any, np.dtype[Any]]
    Convert = Callable[[Array], Array]

_LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")
_EXPERTS = re.compile(r"(blk\.\d+\.ffn_(gate|up|down)_exps)\.weight")
_EMBED_SOURCES = ("token_embd.", "position_embd.", "token_types.")


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """How one checkpoint tensor comes about.

    Attributes:
        name, shape: as in the Hugging Face checkpoint.
        sources: GGUF tensors; several are joined along the second dimension (fused experts).
        convert: from the whole fp32 source to the whole fp32 tensor; None where values are only de-quantised and
            joined, so that a few rows at a time will do.
        is_packable: whether the model uses it as a matrix of a product or a table of rows, and as nothing else.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[GgufTensor, ...]
    convert: Convert | None = None
    is_packable: bool = False

    @property
    def source_bytes(self) -> int:
        return sum(source.nbytes for source in self.sources)

    def values(self, file: GgufValues) -> Iterator[Array]:
        """The tensor's fp32 values in row-major order, in blocks of any shape."""
        if self.convert is not None:
            yield self.convert(file.whole(self.sources[0]))
            return
        # Sources that are joined along the second dimension alternate row by row; a lone one goes in larger blocks.
        step = rows_at_a_time(self.shape) if len(self.sources) == 1 else 1
        for start in range(0, self.shape[0], step):
            for source in self.sources:
                yield file.rows(source, start, min(start + step, self.shape[0]))

    def moves(self) -> BlockMoves | None:
        """How the file's blocks become the tensor's without being de-quantised; None where they cannot."""
        kinds = {source.ggml_type.name for source in self.sources}
        if not self.is_packable or len(kinds) != 1 or not kinds <= BLOCK_BYTES.keys():
            return None
        if self.convert is None:
            return BlockMoves(kinds.pop())
        same = self.sources[0].shape == self.shape
        return found_moves(kinds.pop(), self.shape, self.convert) if same else None

    def blocks(self, file: GgufValues, moves: BlockMoves) -> Iterator[Array]:
        """The tensor's blocks in order, uint8 ``[rows, bytes of a row]`` at a time."""
        if moves.is_still:
            step = rows_at_a_time(self.shape) if len(self.sources) == 1 else 1
            for start in range(0, self.shape[0], step):
                for source in self.sources:
                    yield file.blocks(source, start, min(start + step, self.shape[0]))
        else:
            yield moves.moved(file.blocks(self.sources[0], 0, self.shape[0]))


def plan_tensors(header: GgufHeader, config: PretrainedConfig) -> dict[str, list[TensorPlan]]:
    """What every part of the model is made of: ``embed``, ``layer-00000`` and on, ``head``.

    Builds the model without storage (meta device) to learn its tensors' names and shapes.

    Raises:
        UnsupportedModelError: a tensor of the file has no place in the model, one of the model's is not in the file,
            or a shape differs; nothing is dropped or invented.
    """
    arch = header.architecture
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise UnsupportedModelError(f"transformers builds no language model from a GGUF of {arch}: {error}") from error
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    plans = _converted_plans(header, config) if arch in GGUF_ARCHS else _processed_plans(header, config, model)
    _check_complete(arch, expected, plans)
    packable = packable_weights(model)
    parts: dict[str, list[TensorPlan]] = {}
    for plan in plans:
        if plan.name in expected:  # leaves out a second copy of tied embeddings
            parts.setdefault(_part_of(plan, arch), []).append(replace(plan, is_packable=plan.name in packable))
    return parts


def _part_of(plan: TensorPlan, arch: str) -> str:
    if (match := _LAYER.search(plan.name)) is not None:
        return f"layer-{int(match[1]):05d}"
    source = plan.sources[0].name
    # lfm2 calls its final norm token_embd_norm
    is_embed = source.startswith(_EMBED_SOURCES) or (source.startswith("token_embd_norm.") and arch != "lfm2")
    return "embed" if is_embed else "head"


def _check_complete(arch: str, expected: dict[str, tuple[int, ...]], plans: list[TensorPlan]) -> None:
    planned = {plan.name: plan.shape for plan in plans}
    if missing := sorted(expected.keys() - planned.keys()):
        raise UnsupportedModelError(
            f"this GGUF of {arch} lacks {len(missing)} tensors that transformers' model has, such as {missing[0]}; "
            f"{USE_SAFETENSORS}"
        )
    for name, shape in expected.items():
        if planned[name] != shape:
            raise UnsupportedModelError(
                f"{name} has the shape {list(planned[name])} in this GGUF of {arch} and {list(shape)} in the model "
                f"that transformers builds from its metadata; {USE_SAFETENSORS}"
            )
    if extra := sorted(planned.keys() - expected.keys() - {"lm_head.weight"}):
        raise UnsupportedModelError(f"this GGUF of {arch} has {extra[0]}, which transformers' model has no place for")


class _Names:
    """What transformers' name map asks of a model, without the modules inside its layers.

    The map is built anew for every submodule, though only the base model's names can add to it (for files made of a
    base model alone), which takes seconds for 30 layers and grows with their square.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.config = model.config
        self.state_dict = model.state_dict

    def named_children(self) -> list[tuple[str, _Names]]:
        prefix = getattr(self._model, "base_model_prefix", "")
        return [(prefix, _Names(base))] if isinstance(base := self._model._modules.get(prefix), PreTrainedModel) else []


def _processed_plans(header: GgufHeader, config: PretrainedConfig, model: torch.nn.Module) -> list[TensorPlan]:
    """Plans by the name map and the tensor processors."""
    make_processor: Any = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)
    processor = make_processor(config=config.to_dict())
    try:
        names = get_gguf_hf_weights_map(_Names(model), processor)
    except NotImplementedError as error:
        raise UnsupportedModelError(f"a GGUF of {header.architecture} cannot be read: {error}") from error
    plans: list[TensorPlan] = []
    fused: dict[str, list[GgufTensor]] = {}
    for tensor in header.tensors.values():
        if (match := _EXPERTS.fullmatch(tensor.name)) is not None and match[1] in names:
            name = names[match[1]]
            if match[2] == "down":
                plans.append(TensorPlan(name, tensor.shape, (tensor,)))
            else:
                fused.setdefault(name, []).append(tensor)
        elif tensor.name in names:
            plans.append(_processed_plan(tensor, names[tensor.name], processor))
        elif tensor.name != ROPE_FACTORS:  # these went into the config
            raise UnsupportedModelError(
                f"transformers drops {tensor.name} when it reads a GGUF of {header.architecture}, which could change "
                f"every answer; {USE_SAFETENSORS}"
            )
    for name, pair in fused.items():
        pair.sort(key=lambda tensor: ".ffn_up_" in tensor.name)  # gate first, as transformers fuses them
        plans.append(_joined_plan(name, pair))
    return plans


def _processed_plan(tensor: GgufTensor, name: str, processor: TensorProcessor) -> TensorPlan:
    process: Any = processor.process  # untyped

    def convert(values: Array) -> Array:
        held: dict[str, Any] = {"tensors": {}}
        done = process(weights=values, name=tensor.name, tensor_key_mapping={}, parsed_parameters=held)
        # a nameless result says that the processor put it there itself
        return np.asarray(done.weights if done.name is not None else held["tensors"][name].numpy())

    # Shown an array of the right shape but without storage, a processor tells whether it touches this tensor.
    probe = np.broadcast_to(np.int8(-1), tensor.shape)
    with np.errstate(all="ignore"):
        shown = convert(probe)
    return TensorPlan(name, tuple(shown.shape), (tensor,), None if shown is probe else convert)


def _joined_plan(name: str, tensors: list[GgufTensor]) -> TensorPlan:
    first = tensors[0].shape
    rows = sum(tensor.shape[1] for tensor in tensors)
    return TensorPlan(name, (first[0], rows, *first[2:]), tuple(tensors))


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
        converter, order = None, 0
        if pattern is not None and (converter := by_pattern.get(pattern)) is not None:
            order = converter.source_patterns.index(pattern)
        found.setdefault(name, (converter, []))[1].append((order, tensor))
    plans = []
    for name, (converter, ranked) in found.items():
        tensors = [tensor for _, tensor in sorted(ranked, key=lambda pair: pair[0])]
        plans.append(_converted_plan(name, tensors, converter))
    return plans


def _converted_plan(name: str, tensors: list[GgufTensor], converter: WeightConverter | None) -> TensorPlan:
    operations = converter.operations if converter is not None else []
    if len(tensors) > 1:
        if len(operations) != 1 or not isinstance(operations[0], ConcatenateRows) or operations[0].dim != 1:
            raise UnsupportedModelError(f"no way is known here to join {[t.name for t in tensors]} into {name}")
        return _joined_plan(name, tensors)
    if not operations:
        return TensorPlan(name, tensors[0].shape, tuple(tensors))

    def convert(values: Array) -> Array:
        value: Any = torch.from_numpy(values)
        for operation in operations:
            value = operation.convert({name: value}, [name], [name], full_layer_name=name)[name]
        return np.asarray(value.numpy())

    shape = convert(np.zeros(tensors[0].shape, np.float32)).shape
    return TensorPlan(name, tuple(shape), tuple(tensors), convert)
