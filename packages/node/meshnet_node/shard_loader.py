"""Loading a shard: of a whole model's checkpoint, only the tensors of a range of layers.

The model is built on the meta device (no memory), pruned to the range, and filled one layer at a time through
transformers' own conversion machinery, so fused experts and renamed weights come out as ``from_pretrained`` would make
them. Peak memory is what the range holds plus the conversion of one layer; bytes read are those of the range's tensors.
Code from a checkpoint is never run. Knows nothing of sessions or frames; formats other than safetensors are converted
before they get here.
"""

from __future__ import annotations

import copy
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.generic import ContextManagers
from transformers.utils.loading_report import LoadStateDictInfo

from meshnet_core.errors import InvalidInputError, ModelNotFoundError, UnsupportedModelError
from meshnet_core.layer_range import LayerRange
from meshnet_node.checkpoint_reader import CheckpointReader, LazyTensor, StoredTensor
from meshnet_node.device_choice import choose_device, choose_dtype, dtype_name
from meshnet_node.device_memory import give_back
from meshnet_node.family_support import Family, check_split, family_of, text_config_of
from meshnet_node.huge_pages import into_huge_pages
from meshnet_node.laid_out_experts import lay_out_experts
from meshnet_node.layer_slicing import base_of, prune
from meshnet_node.model_backend import TorchModelShard
from meshnet_node.packed_linear import pack_linears
from meshnet_node.quick_layer import quicken
from meshnet_node.transformers_bars import no_bars
from meshnet_node.weight_choice import ROUNDS, keeps_packed
from meshnet_node.weight_packing import Packing

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes to read), from any thread, one call at a time."""

_TOWER_NAMES = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
}
"""How multimodal checkpoints call the tensors of their text tower -> how it calls them itself."""

_LAYER_NUMBER = re.compile(r"\blayers\.(\d+)\.")


def read_config(folder: Path) -> PreTrainedConfig:
    """The text config of a model folder; reads ``config.json`` only.

    Raises:
        ModelNotFoundError: if there is none.
        UnsupportedModelError: by name and reason, if the family or one of its options cannot be served in pieces.
    """
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{folder} holds no config.json; give a Hugging Face model folder")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModelError(f"transformers cannot read {folder / 'config.json'}: {error}") from error
    config = text_config_of(config)
    family_of(config)
    return config


def load_shard(
    folder: Path,
    layers: LayerRange,
    *,
    dtype: str = "auto",
    device: str = "auto",
    quantize: str = "auto",
    progress: Progress | None = None,
) -> TorchModelShard:
    """Read and hold ``layers`` of the model in ``folder``, and what goes with them.

    The first layer brings the embedding, the last one the final norm and the output projection (the embedding matrix
    where they are tied); no other tensor is read.

    Args:
        folder: ``config.json`` and one or more ``*.safetensors``; files without any tensor of ``layers`` may be absent.
        dtype, device: see :mod:`meshnet_node.device_choice`.
        quantize: see :mod:`meshnet_node.weight_choice`.

    Raises:
        ModelNotFoundError: if the folder or a tensor that the range needs is not there.
        UnsupportedModelError: by name and reason.
        InvalidInputError: a range past the model's end, an unknown dtype or device, a broken file.
    """
    return plan_shard(folder, layers, dtype=dtype, device=device, quantize=quantize).load(progress)


def plan_shard(
    folder: Path, layers: LayerRange, *, dtype: str = "auto", device: str = "auto", quantize: str = "auto"
) -> ShardPlan:
    """What :func:`load_shard` would load, without reading a tensor; arguments and errors are its own."""
    config = read_config(folder)
    if layers.stop > config.num_hidden_layers:
        raise InvalidInputError(
            f"layers {layers} reach past this model's last layer, {config.num_hidden_layers - 1}; "
            f"its layers are 0-{config.num_hidden_layers - 1}"
        )
    check_split(config, layers)
    family = family_of(config)
    checkpoint = CheckpointReader(folder)
    on = choose_device(device)
    model = empty_model(config, choose_dtype(dtype, on, checkpoint.float_dtype()))
    prune(model, layers, family)
    return ShardPlan(folder, layers, family, on, model, quantize)


class ShardPlan:
    """A shard that can be loaded, again and again: its model, pruned, on the meta device, where it takes no memory.

    Building that model changes torch's default dtype for the whole process while it lasts, so it is done here, once;
    loading leaves alone what other threads see.

    Attributes:
        layers: what it will hold.
        num_layers, hidden_size: of the whole model.
        max_positions: likewise; None where its config does not say.
        dtype: what it will compute in, by name, and how weights are held (:mod:`meshnet_core.dtypes`).
        device: where.
        packed_bytes: bytes of weights that it will hold packed.
        weight_bytes: bytes of weights that it will hold, to within a few that a family keeps wider.
    """

    def __init__(
        self,
        folder: Path,
        layers: LayerRange,
        family: Family,
        device: torch.device,
        model: PreTrainedModel,
        quantize: str = "auto",
    ) -> None:
        config = model.config
        self._packing = _packing(model, CheckpointReader(folder), device, quantize)
        self.layers = layers
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self.dtype = "+".join(filter(None, (dtype_name(model.dtype), self._packing.held)))
        self.device = device
        self.packed_bytes = self._packing.nbytes
        plain = sum(
            parameter.nbytes for name, parameter in model.named_parameters() if name not in model.all_tied_weights_keys
        )
        self.weight_bytes = plain - self._packing.replaced_bytes + self._packing.nbytes
        self._folder = folder
        self._family = family
        self._model = model

    def load(self, progress: Progress | None = None) -> TorchModelShard:
        """Read the tensors and hold them; errors are those of :func:`load_shard`."""
        model = self.load_model(progress)
        if self._family.quick:
            quicken(base_of(model), model.config._attn_implementation)
        pack_linears(model, keep=self._family.reads_weights)
        lay_out_experts(model)
        into_huge_pages(chain(model.parameters(), model.buffers()))
        with self._read_weights_are_refused():
            return TorchModelShard(model, self.layers, self._family)  # runs it once

    def load_model(self, progress: Progress | None = None) -> PreTrainedModel:
        """The pruned model itself, filled: of all layers it is transformers' whole model."""
        layers, model = self.layers, copy.deepcopy(self._model)
        checkpoint, packing = CheckpointReader(self._folder), self._packing
        with self._read_weights_are_refused():
            _fill(model, checkpoint, self.device, layers, progress or (lambda done, total: None), packing)
        if layers.start > 0:
            base_of(model).set_input_embeddings(nn.Identity())  # a tied tail's matrix lives on in its output projection
        model.train(mode=False).requires_grad_(requires_grad=False)
        if packing.nbytes:
            give_back(self.device)  # what rows took on their way
        return model

    @contextmanager
    def _read_weights_are_refused(self) -> Iterator[None]:
        """Packed modules have no weight: families whose own code looks at one are refused by name."""
        try:
            yield
        except AttributeError as error:
            if not self._packing.nbytes:
                raise
            raise UnsupportedModelError(
                f"{self._model.config.model_type} uses weights otherwise than in plain products ({error}), so that "
                "they cannot be held packed; take --quantize none"
            ) from error


def _packing(model: PreTrainedModel, checkpoint: CheckpointReader, device: torch.device, quantize: str) -> Packing:
    possible = keeps_packed(quantize, device, model.dtype)
    packing = Packing(model, checkpoint, quantize)
    if packing.nbytes and not possible:
        raise InvalidInputError(
            f"{checkpoint.folder} holds packed weights, which are for bfloat16 on a CPU; prepare the model without"
        )
    if quantize in ROUNDS and (wide := packing.wide_experts):
        raise UnsupportedModelError(
            f"--quantize {quantize} does not do for {model.config.model_type}: its experts ({wide}), most of its "
            "weights, have no form that can be held packed (no biases, gate and up side by side, multiples of 32)"
        )
    if quantize in ROUNDS and not packing.held:
        raise UnsupportedModelError(
            f"--quantize {quantize} does not do for {model.config.model_type}: its layers have no plain products of at "
            "least 32 rows and a multiple of 32 columns"
        )
    return packing


def empty_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The whole causal model on the meta device."""
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # By family and not by device, so that all nodes of a route round alike.
    config._attn_implementation = "sdpa" if model_class._supports_sdpa else "eager"
    config.dtype = dtype
    with ContextManagers(model_class.get_init_context(dtype, False, False, None)):
        model: PreTrainedModel = model_class(config)
    return model


def _fill(
    model: PreTrainedModel,
    checkpoint: CheckpointReader,
    device: torch.device,
    layers: LayerRange,
    progress: Progress,
    packing: Packing,
) -> None:
    """Read the tensors that ``model`` still has on the meta device, layer by layer, and make its buffers."""
    taken = packing.take_out(model)
    towers: Any = [WeightRenaming(theirs, own) for theirs, own in _TOWER_NAMES.items()]
    conversions: list[Any] = [*towers, *get_model_conversion_mapping(model)]
    wanted = _wanted(model, checkpoint, conversions)
    plain_bytes = sum(stored.nbytes for group in wanted for stored in group)
    counter = _ByteCounter(plain_bytes + packing.stored_bytes, progress)
    load_config = LoadStateDictConfig(
        pretrained_model_name_or_path=str(checkpoint.folder),
        device_map={"": device},
        dtype=model.dtype,
        dtype_plan=model._get_dtype_plan(model.dtype),
        weight_mapping=conversions,
    )
    info = LoadStateDictInfo(set(model.state_dict()), set(), set(), [], {}, set())
    with no_bars():
        # A layer at a time: the machinery reads all it is given ahead of converting it.
        for group in wanted:
            lazy = {stored.name: LazyTensor(stored, counter.add) for stored in group}
            part, _ = convert_and_load_state_dict_in_model(model, lazy, load_config, None)
            info.missing_keys &= part.missing_keys
            info.mismatched_keys |= part.mismatched_keys
            info.conversion_errors |= part.conversion_errors
            packing.round_loaded(model, taken)
    _refuse_incomplete(model, info, checkpoint.folder, layers)
    model._finalize_model_loading(model, load_config, info)
    packing.put_in(model, taken, counter.add)


def _wanted(model: PreTrainedModel, checkpoint: CheckpointReader, conversions: list[Any]) -> list[list[StoredTensor]]:
    """The stored tensors that the pruned model has a place for, one list for each layer and one for the rest."""
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    places = model.state_dict()
    groups: defaultdict[int, list[StoredTensor]] = defaultdict(list)
    for name, stored in checkpoint.tensors.items():
        place, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, places)
        if place in places:
            number = _LAYER_NUMBER.search(place)
            groups[int(number[1]) if number else -1].append(stored)
    return [groups[number] for number in sorted(groups)]


def _refuse_incomplete(model: PreTrainedModel, info: LoadStateDictInfo, folder: Path, layers: LayerRange) -> None:
    if info.conversion_errors:
        name, reason = next(iter(info.conversion_errors.items()))
        raise InvalidInputError(f"{folder}: {name} cannot be made from the tensors stored: {reason.splitlines()[-1]}")
    if info.mismatched_keys:
        name, stored, expected = next(iter(info.mismatched_keys))
        raise InvalidInputError(
            f"{folder}: {name} is {list(stored)} and config.json says {list(expected)}; they are of different models"
        )
    # A tied output projection is never stored; it is there if the matrix it is tied to is.
    missing = sorted(info.missing_keys - model.all_tied_weights_keys.keys())
    if missing:
        raise ModelNotFoundError(
            f"{folder} lacks {len(missing)} tensors that layers {layers} need, such as {missing[0]}; "
            "fetch the files that hold them"
        )


class _ByteCounter:
    """Adds up bytes read by several threads and tells the progress callback, one call at a time."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            self._progress(self._done, self._total)
