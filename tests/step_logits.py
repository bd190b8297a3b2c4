"""Logits of decode steps in bfloat16: what a way of running them gives, and how near it is to the one it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from meshnet_core.layer_range import LayerRange
from meshnet_node.layer_view import LayerView
from meshnet_node.model_backend import TorchModelShard
from meshnet_node.shard_loader import load_shard
from meshnet_node.shard_work import never
from tiny_models import VOCAB, num_layers, save_tiny

FRAMES = (20, 7, *[1] * 8, 3, *[1] * 8)
"""Positions of each: chunks, steps, drafts between them; windows of the tiny models are of 11."""

WIDE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 32}
"""Settings of a tiny model that is wide enough for packed weights."""


def whole_shard(
    root: Path, family: str, dtype: str = "bfloat16", quantize: str = "auto", **settings: object
) -> TorchModelShard:
    """A whole tiny model as one shard, saved in ``root`` once; its weights are bfloat16's in every dtype."""
    folder = root / family
    if not folder.exists():
        (file,) = save_tiny(family, folder, **settings).glob("*.safetensors")
        weights = {name: tensor.bfloat16().float() for name, tensor in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
    return load_shard(folder, LayerRange(0, num_layers(family)), dtype=dtype, device="cpu", quantize=quantize)


def drawn(count: int, seed: int) -> torch.Tensor:
    """Token ids ``[1, count]``."""
    return torch.randint(3, VOCAB, (1, count), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def run(view: LayerView, *, plain: bool = False, frames: Sequence[int] = FRAMES) -> torch.Tensor:
    """Logits ``[positions, vocab]`` of one session in ``frames``."""
    cache, position, logits = view.new_cache(), 0, []
    ids = drawn(sum(frames), seed=1)
    for count in frames:
        frame = ids[:, position : position + count]
        logits.append(
            view.forward(frame, position=position, cache=cache, sample=count, cancelled=never, plain=plain)[0]
        )
        position += count
    return torch.cat(logits)


def assert_near(ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """Whether ``ours`` is as near to float32's logits as the plain steps' are: in the middle, since rounding may send a
    position to other experts.
    """
    by_rounding = float((plain.float() - exact).abs().median())
    assert 0.0001 < by_rounding < 0.1
    assert float((ours.float() - exact).abs().median()) <= 1.5 * by_rounding  # CPUs round apart
