"""A whole model as transformers itself loads and runs it: the reference that splits are compared with.

Shares nothing with shards but the files: no pruning, no views, and a cache that counts positions for itself.
Knows nothing of checks.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from meshnet_core.errors import ModelNotFoundError
from meshnet_core.layer_range import LayerRange
from meshnet_node.device_choice import dtype_name
from meshnet_node.model_backend import held_bytes
from meshnet_node.shard_loader import plan_shard, read_config
from meshnet_node.tensor_index import INDEX_NAME, index_folder
from meshnet_node.transformers_bars import no_bars
from meshnet_node.weight_choice import keeps_packed


class UnsplitModel:
    """The whole model in one piece.

    Args:
        folder: as :func:`~meshnet_node.shard_loader.load_shard` takes it, with all layers.
        dtype: to compute in.
        device: to run on.
        quantize: where weights are held packed, transformers' own loading cannot be had: only its modules are then.

    Raises:
        ModelNotFoundError: the folder or a tensor of the model is not there.
        UnsupportedModelError: by name and reason.
    """

    _model: Any

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, quantize: str = "auto") -> None:
        config = read_config(folder)
        if keeps_packed(quantize, device, dtype):
            everything = LayerRange(0, config.num_hidden_layers)
            plan = plan_shard(folder, everything, dtype=dtype_name(dtype), device=str(device), quantize=quantize)
            if plan.packed_bytes:
                self._model = plan.load_model()
                return
        with _indexed(folder) as whole, no_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                whole, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
            )
        model, info = loaded
        if missing := sorted(info["missing_keys"]):
            raise ModelNotFoundError(f"{folder} lacks {len(missing)} tensors of the model, such as {missing[0]}")
        self._model = model.to(device).eval()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights and buffers held."""
        return held_bytes(self._model)

    def open(self) -> DynamicCache:
        """An empty cache."""
        return DynamicCache(config=self._model.config)

    @torch.inference_mode()
    def frame(self, ids: Sequence[int], position: int, state: DynamicCache | None, sample: int) -> torch.Tensor:
        """Run ``ids`` after what ``state`` holds; float32 logits ``[sample, vocab]`` of the last ones, on the CPU.

        ``position`` is the cache's own affair here: the reference must not depend on what is to be checked.
        """
        del position
        output = self._model(
            torch.tensor([ids], device=self._model.device),
            cache=state,
            use_cache=state is not None,
            logits_to_keep=max(sample, 1),
        )
        logits: torch.Tensor = output.logits[0, -max(sample, 1) :].float().cpu()
        return logits[:sample]


@contextmanager
def _indexed(folder: Path) -> Iterator[Path]:
    """A folder that transformers can load: links to the same files, with an index of the tensors that shards read.

    A prepared folder need not have one, and may name its files as transformers would not.
    """
    tensors = index_folder(folder)
    with tempfile.TemporaryDirectory(prefix="meshnet-whole-") as linked:
        whole = Path(linked)
        for path in {path for path, _ in tensors.values()} | {folder / "config.json"}:
            (whole / path.name).symlink_to(path.resolve())
        weights = {name: path.name for name, (path, _) in tensors.items()}
        (whole / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weights}), "utf-8")
        yield whole
