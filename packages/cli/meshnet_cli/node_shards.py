"""What a node offers: MODEL and range of each shard as typed, resolved to files and planned, the first of them loaded.

Importing it imports no torch; the functions that need it do.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from meshnet_core.errors import InvalidInputError, ModelNotFoundError
from meshnet_core.layer_range import LayerRange

if TYPE_CHECKING:
    from meshnet_cli.progress import ProgressReporter
    from meshnet_node.model_backend import TorchModelShard
    from meshnet_node.model_files import ModelFiles
    from meshnet_node.offered_shard import OfferedShard, Progress
    from meshnet_node.shard_loader import ShardPlan
    from meshnet_node.shard_pool import ShardPool

UNBOUNDED_POSITIONS = 2**20  # for models that know no limit, such as recurrent ones: a session needs one

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShardChoice:
    """One shard as a person names it."""

    model: str
    layers: LayerRange

    @classmethod
    def parse(cls, text: str) -> ShardChoice:
        """Read ``MODEL@FIRST-LAST``, as ``--also`` takes it.

        Raises:
            InvalidInputError: it is something else.
        """
        model, at, layers = text.rpartition("@")
        if not at or not model:
            raise InvalidInputError(f"--also {text!r} is no shard; write MODEL@FIRST-LAST, such as Qwen2.5-0.5B/@0-11")
        return cls(model, LayerRange.parse(layers))


@dataclass(frozen=True, slots=True)
class WeightsWanted:
    """``--dtype``, ``--quantize`` and ``--compile`` as typed."""

    dtype: str
    quantize: str
    compile: str = "auto"


def load_pool(
    choices: list[ShardChoice],
    max_loaded: int | None,
    weights: WeightsWanted,
    device: str,
    report: ProgressReporter,
) -> ShardPool:
    """Resolve and plan every shard, converting what must be, and load as many as may be loaded, in the order given.

    Raises:
        MeshnetError: a model cannot be opened or cut so, a shard is given twice, or the memory does not do.
    """
    from meshnet_node.device_choice import choose_device
    from meshnet_node.device_memory import free_bytes
    from meshnet_node.model_files import open_model
    from meshnet_node.shard_pool import ShardPool

    files = {choice.model: open_model(choice.model).rounded(weights.quantize) for choice in choices}
    offers: list[OfferedShard] = []
    for choice in choices:
        offer = _offer(choice, files[choice.model], weights, device, report)
        if any((o.known.fingerprint, o.layers) == (offer.known.fingerprint, offer.layers) for o in offers):
            raise InvalidInputError(f"{offer} are given twice; give each shard once")
        offers.append(offer)
    pool = ShardPool(offers, max_loaded=max_loaded, free_bytes=partial(free_bytes, choose_device(device)))
    pool.load_first(lambda offer, done, total: report("", f"loading {offer}", done, total))
    return pool


def _offer(
    choice: ShardChoice, files: ModelFiles, weights: WeightsWanted, device: str, report: ProgressReporter
) -> OfferedShard:
    import torch

    from meshnet_node.compile_choice import compiles_steps
    from meshnet_node.device_choice import choose_device, choose_dtype, dtype_name
    from meshnet_node.family_support import check_config
    from meshnet_node.shard_loader import plan_shard
    from meshnet_node.weight_choice import keeps_packed

    check_config(files.config, choice.layers)  # before anything is fetched or converted
    # What a GGUF is de-quantised to: as for a checkpoint in 16 bits. Safetensors stay as they are.
    on = choose_device(device)
    compiles_steps(weights.compile, on)  # refused now where it cannot be had, not once it is loaded
    prepared = choose_dtype(weights.dtype, on, torch.bfloat16)
    layers = choice.layers
    folder = files.prepare(
        layers,
        dtype=dtype_name(prepared),
        packed=keeps_packed(weights.quantize, on, prepared),
        progress=lambda what, done, total: report("", what, done, total),
    )
    plan = plan_shard(folder, layers, dtype=weights.dtype, device=device, quantize=weights.quantize)
    return offered(plan, choice.model, files, weights)


def offered(plan: ShardPlan, model: str, files: ModelFiles, weights: WeightsWanted) -> OfferedShard:
    """What was planned, to be loaded when it is wanted; ``model`` is MODEL as typed."""
    from meshnet_core.membership import ShardInfo
    from meshnet_node.offered_shard import OfferedShard

    known = ShardInfo(
        model=files.name,
        fingerprint=files.fingerprint,
        layers=plan.layers,
        num_layers=plan.num_layers,
        hidden_size=plan.hidden_size,
        max_positions=files.max_positions or plan.max_positions or UNBOUNDED_POSITIONS,
        dtype=plan.dtype,
        weight_bytes=plan.weight_bytes,
    )
    return OfferedShard(known, partial(_load, plan, model, files, weights), files.text_files())


def _load(
    plan: ShardPlan, model: str, files: ModelFiles, weights: WeightsWanted, progress: Progress
) -> TorchModelShard:
    """Load what was planned, unless the folder holds another model by now: it would answer under a wrong name."""
    from meshnet_node.compile_choice import compiles_steps, takes_kernels
    from meshnet_node.cpu_threads import take_cpu_threads
    from meshnet_node.model_files import open_model
    from meshnet_node.step_warm_up import StepWarmUp

    take_cpu_threads(1)  # the forward lane's team of threads is to be the only one
    if (
        Path(model).expanduser().is_dir()
        and open_model(model).rounded(weights.quantize).fingerprint != files.fingerprint
    ):
        raise ModelNotFoundError(f"the files of {model} were changed since this node started; start it again")
    shard = plan.load(progress)
    if takes_kernels(weights.compile):
        shard.use_kernels()
    if compiles_steps(weights.compile, plan.device):
        if shard.whole_view().may_step_native:
            logger.info("layers %s are of a kind that --compile auto has quicker steps for than step", plan.layers)
        shard.warm_up(StepWarmUp(shard))
    return shard
