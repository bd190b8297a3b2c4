"""The shards of one split in one process, with no wire between them: frames go through all of them in turn.

Each shard is loaded as a node loads it and gets the bytes that a node would get. Knows nothing of checks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import torch

from meshnet_core.dtypes import wire_dtype
from meshnet_core.errors import HopFailedError
from meshnet_node.session_state import SessionState
from meshnet_node.shard_loader import load_shard
from meshnet_node.shard_work import ShardWork
from meshnet_node.split import Split
from meshnet_node.step_compiler import Compile
from meshnet_node.step_warm_up import StepState, StepWarmUp


class ShardRoute:
    """Loaded shards in a row.

    Args:
        folder: a prepared model folder.
        split: which layers each shard holds.
        dtype, device, quantize: by name, as :func:`~meshnet_node.shard_loader.load_shard` takes them.
        kernels: take steps through this machine's kernels, where it has some and layers can be run so.

    Attributes:
        dtype: what they compute in, and how weights are held.

    Raises:
        UnsupportedModelError: this model cannot be cut so, with the reason.
        MeshnetError: as ``load_shard``.
    """

    def __init__(
        self, folder: Path, split: Split, *, dtype: str, device: str, quantize: str = "auto", kernels: bool = False
    ) -> None:
        self._starts = split.starts
        self._shards = [load_shard(folder, held, dtype=dtype, device=device, quantize=quantize) for held in split.held]
        for shard in self._shards if kernels else ():
            shard.use_kernels()
        self.dtype = max((shard.dtype for shard in self._shards), key=len)  # one without packed layers is part of it
        self._wire_dtype = wire_dtype(shard.dtype for shard in self._shards)

    @property
    def steps(self) -> str:
        """What decode steps are: ``compiled`` or ``native`` if they are on every shard, else ``plain``."""
        if all(shard.runs_compiled for shard in self._shards):
            return "compiled"
        return "native" if all(shard.runs_native for shard in self._shards) else "plain"

    def compile(self, compile_layers: Compile) -> str | None:
        """Have every shard take compiled decode steps; blocks until they do.

        Returns:
            Which shard's steps are not the same or cannot be had, and why; None if all are compiled.
        """
        for shard in self._shards:
            warm_up = StepWarmUp(shard, compile_layers, is_worth=lambda _found: True, sleep=lambda _seconds: None)
            warm_up.run()
            if warm_up.status.state is not StepState.READY:
                return f"decode steps of layers {shard.layers} are refused: {warm_up.status.detail}"
        return None

    def open(self) -> list[SessionState]:
        """A session's empty state on every hop."""
        return [shard.new_state(start) for shard, start in zip(self._shards, self._starts, strict=True)]

    def lose(self, state: list[SessionState], hop: int) -> None:
        """What an evicted or restarted hop is left with: nothing of this session."""
        hop %= len(self._shards)
        state[hop] = self._shards[hop].new_state(self._starts[hop])

    def frame(self, ids: Sequence[int], position: int, state: list[SessionState] | None, sample: int) -> torch.Tensor:
        """Run one frame through all hops.

        Returns:
            float32 logits ``[sample, vocab]`` of the last positions, on the CPU.

        Raises:
            MeshnetError: what a hop refuses or fails with.
        """
        payload: bytes | memoryview = struct.pack(f"<{len(ids)}i", *ids)
        for index, (shard, start) in enumerate(zip(self._shards, self._starts, strict=True)):
            work = ShardWork(
                start=start,
                state=None if state is None else state[index],
                position=position,
                seq_len=len(ids),
                payload=payload,
                wire_dtype=self._wire_dtype,
                sample=sample if shard.is_last else 0,
            )
            (result,) = shard.forward([work])
            if isinstance(result, Exception):
                raise result
            if shard.is_last:
                return torch.empty(0, shard.vocab_size) if result.logits is None else result.logits.cpu()
            payload = result.hidden or b""
        raise HopFailedError("the split ends before the model's last layer")
