"""Frames for looking at a shard's step from inside its node: made-up inputs, in the shard's turn, one at a time.

Knows nothing of what is looked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from transformers import DynamicCache

from meshnet_core.layer_range import LayerRange
from meshnet_node.compiled_step import CompiledLayer
from meshnet_node.layer_view import LayerView, StepTree

CHUNK = 8  # positions of a frame that prefills: a session waits for one of them at most
REST = 1.0  # times what a frame took


class StoppedError(Exception):
    """Nobody wants the compiled layers any more."""


class CompilableShard(Protocol):
    """What making a compiled step needs of a shard."""

    layers: LayerRange
    model_type: str

    def whole_view(self) -> LayerView:
        """The view of all its layers."""
        ...

    def its_turn(self) -> AbstractContextManager[object]:
        """Keeps frames out within the block."""
        ...

    def use_compiled(self, layers: Sequence[CompiledLayer]) -> None:
        """Take decode steps through ``layers`` from now on."""
        ...


class StepFrames:
    """One view's, from the first position on.

    Args:
        shard: whose turn is taken for each frame, and rested after.
        positions: how many may be run.
        stopped: whether to raise instead of running another one.
        sleep, now: of the rests.
        tree: that single positions after the first go through; None for the plain one.

    Attributes:
        cache: what they filled.
        step_s: seconds of each frame of one position that ran through ``tree``, or would have.

    Raises:
        StoppedError: from any frame.
    """

    def __init__(
        self,
        shard: CompilableShard,
        positions: int,
        *,
        stopped: Callable[[], bool],
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.perf_counter,
        tree: StepTree | None = None,
    ) -> None:
        self._shard = shard
        self._view = view = shard.whole_view()
        self._stopped, self._sleep, self._now = stopped, sleep, now
        self._tree = tree
        self._inputs = _inputs(view, positions)
        self._position = 0
        self.cache: DynamicCache = view.new_cache()
        self.step_s: list[float] = []

    def prefill(self, positions: int) -> None:
        """Run so many positions, plainly, in frames of :data:`CHUNK`."""
        for at in range(0, positions, CHUNK):
            self._run(min(CHUNK, positions - at), None)

    def frame(self, positions: int) -> torch.Tensor:
        """Run them in one frame; float32 logits ``[positions, vocab]`` of the last shard, hidden states of another."""
        return self._run(positions, None)

    def steps(self, count: int) -> torch.Tensor:
        """Run so many positions one by one, through the tree; what :meth:`frame` gives."""
        return torch.cat([self._run(1, self._tree) for _ in range(count)])

    def _run(self, count: int, tree: StepTree | None) -> torch.Tensor:
        view, position = self._view, self._position
        with self._shard.its_turn(), torch.inference_mode():
            if self._stopped():
                raise StoppedError
            before, view.step = view.step, tree
            began = self._now()
            try:
                output = view.forward(
                    self._inputs[:, position : position + count],
                    position=position,
                    cache=self.cache,
                    sample=count if view.is_last else 0,
                    cancelled=lambda: False,
                )
                rows = output[0].float().cpu()
            finally:
                view.step = before
            took = self._now() - began
        self._position += count
        if count == 1:
            self.step_s.append(took)
        self._sleep(REST * took)
        return rows


def _inputs(view: LayerView, count: int) -> torch.Tensor:
    """Token ids ``[1, count]``, or hidden states ``[1, count, hidden]``, drawn with a fixed seed."""
    draw = torch.Generator().manual_seed(0)
    config, like = view.config, next(iter(view.plain_layers.parameters()))
    if view.layers.start == 0:
        return torch.randint(config.vocab_size, (1, count), generator=draw).to(like.device)
    return torch.randn(1, count, config.hidden_size, generator=draw).to(like.device, view.model.dtype)
