"""A model of which any layers may be loaded, now or later: what it tells a tracker, and plans of its shards.

Needs ``config.json`` alone until a shard is planned. The whole model is built on the meta device once, at the start,
since that changes torch's default dtype for a moment, which running forwards must not see; each plan prunes a copy.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from meshnet_core.model_facts import ModelFacts
from meshnet_node.device_choice import choose_device, choose_dtype, dtype_name
from meshnet_node.family_support import check_split, config_of, cuts_of, family_of
from meshnet_node.layer_slicing import base_of, prune
from meshnet_node.native_parts import may_have_parts_once_loaded
from meshnet_node.packed_linear import can_pack
from meshnet_node.shard_loader import ShardPlan, empty_model
from meshnet_node.weight_choice import keeps_packed

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import nn
    from transformers import PreTrainedConfig

    from meshnet_core.layer_range import LayerRange
    from meshnet_node.gguf_conversion import Progress
    from meshnet_node.model_files import ModelFiles

ROOM_POSITIONS = 4096  # of session state for which room is kept: one long chat, or a few short ones


class PlaceableModel:
    """One model, at the dtype that this machine would hold it in.

    Args:
        files: of the model.
        dtype, device: see :mod:`meshnet_node.device_choice`; what the checkpoint is stored in is taken from its config.
        quantize: see :mod:`meshnet_node.weight_choice`.

    Attributes:
        dtype: by name, and how weights will be held.
        device: where shards will be.
        may_run_native: whether steps or chunks of its shards may be for the kernels of
            :mod:`meshnet_node.step_kernels`.

    Raises:
        UnsupportedModelError: by name and reason.
        InvalidInputError: an unknown dtype or device.
    """

    def __init__(self, files: ModelFiles, *, dtype: str = "auto", device: str = "auto", quantize: str = "auto") -> None:
        config = config_of(files.config)
        self.device = choose_device(device)
        self.files = files
        chosen = choose_dtype(dtype, self.device, _stored_dtype(config))
        self._packed = keeps_packed(quantize, self.device, chosen)
        self._quantize = quantize
        self._computed_in = dtype_name(chosen)
        self.dtype = "+".join(filter(None, (self._computed_in, files.blocks if self._packed else "")))
        self._config = config
        self._family = family_of(config)
        self._empty = empty_model(config, chosen)
        steps = self._family.quick or may_have_parts_once_loaded(base_of(self._empty).layers)
        self.may_run_native = self.device.type == "cpu" and (can_pack(chosen) or (steps and chosen is torch.bfloat16))

    def facts(self, room_positions: int = ROOM_POSITIONS) -> ModelFacts:
        """Sizes in elements, and the cuts; room for so many positions of session state is kept for each layer."""
        model = self._empty
        base = base_of(model)
        total = sum(p.numel() for name, p in model.named_parameters() if name not in model.all_tied_weights_keys)
        layers = tuple(_elements(layer.parameters()) for layer in base.layers)
        embedding = _elements(base.get_input_embeddings().parameters())
        shared = embedding if model.all_tied_weights_keys else 0
        cuts = cuts_of(self._config)
        limit = self.files.max_positions or room_positions
        return ModelFacts(
            model=self.files.name,
            fingerprint=self.files.fingerprint,
            layers=layers,
            embedding=embedding,
            head=total - sum(layers) - embedding + shared,
            shared=shared,
            room=min(room_positions, limit) * _state_elements(self._config),
            cuts=None if len(cuts) == len(layers) - 1 else cuts,
        )

    def prepare(self, layers: LayerRange, progress: Progress | None = None) -> Path:
        """As :meth:`meshnet_node.model_files.ModelFiles.prepare`."""
        return self.files.prepare(layers, dtype=self._computed_in, packed=self._packed, progress=progress)

    def plan(self, folder: Path, layers: LayerRange) -> ShardPlan:
        """What would be loaded of ``folder`` for ``layers``; as :func:`meshnet_node.shard_loader.plan_shard`.

        Raises:
            UnsupportedModelError: the model cannot be cut so.
        """
        check_split(self._config, layers)
        model = copy.deepcopy(self._empty)
        prune(model, layers, self._family)
        return ShardPlan(folder, layers, self._family, self.device, model, self._quantize)


def _elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _stored_dtype(config: PreTrainedConfig) -> torch.dtype:
    """What the config says that weights are stored in; 16 bits where it does not say."""
    stored = getattr(config, "dtype", None)
    found = getattr(torch, stored, None) if isinstance(stored, str) else stored
    return found if isinstance(found, torch.dtype) else torch.bfloat16


def _state_elements(config: PreTrainedConfig) -> int:
    """Keys and values of one position at one layer of plain attention, the widest one: other kinds keep no more."""
    return max(_attention_elements(layer) for layer in config.per_layer_config)


def _attention_elements(config: PreTrainedConfig) -> int:
    heads = getattr(config, "num_attention_heads", None) or 0
    if not heads:
        return 0
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * (getattr(config, "num_key_value_heads", None) or heads) * int(size)
