"""Frames for shards of tiny models, given to them as a node's lane does."""

from __future__ import annotations

from dataclasses import replace

import torch

from meshnet_node.model_backend import TorchModelShard
from meshnet_node.session_state import SessionState
from meshnet_node.shard_work import ShardResult, ShardWork

HIDDEN = 32
"""Of the tiny models."""


def hidden_work(state: SessionState | None, position: int = 0, seq_len: int = 2, **changes: object) -> ShardWork:
    """A frame of random hidden states, of its own for each position, that enters at layer 1."""
    generator = torch.Generator().manual_seed(position)
    payload = torch.randn(seq_len, HIDDEN, generator=generator).numpy().tobytes()
    work = ShardWork(
        start=1, state=state, position=position, seq_len=seq_len, payload=payload, wire_dtype="float32", sample=0
    )
    return replace(work, **changes)  # type: ignore[arg-type]


def token_work(ids: list[int], **changes: object) -> ShardWork:
    """A frame of token ids, the first of a sequence."""
    payload = torch.tensor(ids, dtype=torch.int32).numpy().tobytes()
    return replace(ShardWork(0, None, 0, len(ids), payload, "float32"), **changes)  # type: ignore[arg-type]


def run(shard: TorchModelShard, work: ShardWork) -> ShardResult:
    """What comes of one frame; raises what the shard tells of it."""
    (result,) = shard.forward([work])
    if isinstance(result, Exception):
        raise result
    return result
