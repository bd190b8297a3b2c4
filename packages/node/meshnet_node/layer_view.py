"""A hop's piece of a shard, ready to run: one frame, or the newest positions of several sessions, through its layers.

Chooses between the ways that there are: the model's own forward, quick layers over single positions, a compiled step,
native steps and native parts. Knows nothing of sessions' names, of the wire or of files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from meshnet_core.layer_range import LayerRange
from meshnet_node.chunk_room import ChunkRoom
from meshnet_node.cpu_attention import STEP_ATTENTION, use_cpu_attention
from meshnet_node.family_support import Family
from meshnet_node.growing_cache import let_grow
from meshnet_node.kernel_library import StepKernels
from meshnet_node.layer_slicing import base_of, sliced
from meshnet_node.native_chunk import NativeChunk, native_chunk
from meshnet_node.native_chunks import NativeChunks, may_have_chunks
from meshnet_node.native_parts import NativeParts, may_have_parts
from meshnet_node.native_step import MOST_ROWS, NativeStep, native_step
from meshnet_node.quick_layer import QuickLayer, are_quick, attention_of
from meshnet_node.ragged_attention import ragged_name
from meshnet_node.ragged_cache import RaggedCache, can_be_ragged

_ATTENDING = frozenset({"full_attention", "sliding_attention", "chunked_attention", "hybrid", "hybrid_sliding"})
_MASK_FREE = frozenset({"full_attention", "sliding_attention", "linear_attention", "conv", "moe", "mlp"})
"""Layer types that need no mask for a single newest position: it may see all that their cache returns to it."""


class ForwardCancelledError(Exception):
    """A forward was stopped between two layers because its frame was cancelled. The session's state is spoiled."""


class StepTree(Protocol):
    """Another way through a view's layers for the newest position of one session.

    Attributes:
        model, base: run in the place of the view's own.
        layers: those that they have, in order.
    """

    model: Any
    base: Any

    @property
    def layers(self) -> Sequence[nn.Module]: ...

    def takes(self, cache: DynamicCache) -> bool:
        """Whether it can run a single position on ``cache``."""
        ...


class LayerView:
    """A hop's piece of a shard: layers from an effective start to the shard's end, ready to run.

    Attributes:
        layers: absolute range.
        model: the causal model, sharing the shard's parameters; run one forward at a time.
        config: the model's, describing only ``layers``.
        runs_together: whether :meth:`forward_together` can run.
        step: taken by frames of one position on a filled cache; None for the plain way.
        native: likewise, where :attr:`step` does not, by frames of a few positions, and by steps of several sessions
            together.
        parts: of the layers that are native by themselves, whether or not :attr:`native` runs them.
        chunks: what of a chunk's way is native by itself, and products of a step's.
        kernels: what all of these are made of.
        chunk: taken, where it is there, by frames of more positions than :attr:`native` takes.
        is_last: whether it projects to logits.
    """

    def __init__(self, shard: PreTrainedModel, held: LayerRange, start: int, family: Family) -> None:
        self.layers = held.starting_at(start)
        self.is_last = held.stop == shard.config.num_hidden_layers
        self.step: StepTree | None = None
        self.native: NativeStep | None = None
        self.parts: NativeParts | None = None
        self.chunks: NativeChunks | None = None
        self.chunk: NativeChunk | None = None
        self.kernels: StepKernels | None = None
        self.model = sliced(shard, held, self.layers)
        self.config: PreTrainedConfig = self.model.config
        self._cancelled: Callable[[], bool] | None = None
        family.adapt(self.model, self.layers)
        use_cpu_attention(self.config, shard.device, shard.dtype)
        self._new_cache = family.new_cache
        self._steps_only = family.steps_only
        types = set(getattr(self.config, "layer_types", None) or ())
        self._no_masks = dict.fromkeys(types) if family.takes_masks and types else None
        self._attends = not types or not types.isdisjoint(_ATTENDING)
        self._step_needs_no_mask = types <= _MASK_FREE
        self._grouped_experts = getattr(self.config, "_experts_implementation", None) == "grouped_mm"
        self._base = base_of(self.model)
        self._is_quick = are_quick(self._base)
        self._layers = tuple(self._base.layers)
        for layer in self._base.layers:
            layer.register_forward_pre_hook(lambda _module, _arguments: self.look_at_cancel())
            if isinstance(layer, QuickLayer):
                layer.settle()
        self._ragged = ragged_name(self.config._attn_implementation)
        self.runs_together = (
            family.runs_together
            and self._ragged is not None
            and self._step_needs_no_mask
            and can_be_ragged(self.new_cache())
        )
        head: Any = getattr(self.model, "lm_head", None)
        self._with_head: tuple[nn.Module, ...] = (*self._layers, head) if isinstance(head, nn.Module) else self._layers
        if isinstance(head, nn.Linear):
            head.register_forward_pre_hook(_lay_dense)

    @property
    def plain_layers(self) -> nn.ModuleList:
        """Its layers, as transformers has them."""
        layers: nn.ModuleList = self._base.layers
        return layers

    def new_cache(self) -> DynamicCache:
        """An empty cache of just this view's layers."""
        return let_grow(self._new_cache(self.config))

    @property
    def may_run_native(self) -> bool:
        """Whether :meth:`use_kernels` may do something."""
        return self.may_step_native or may_have_parts(self._layers) or may_have_chunks(self._with_head)

    @property
    def may_step_native(self) -> bool:
        """Whether all of a step may be native, and not parts of its layers alone."""
        return self._is_quick and self._step_needs_no_mask and self.config._attn_implementation == STEP_ATTENTION

    @property
    def runs_native(self) -> bool:
        """Whether anything of its steps is native."""
        return self.native is not None or self.parts is not None or (self.chunks is not None and self.chunks.in_steps)

    def takes_native(self, position: int, seq_len: int) -> bool:
        """Whether a frame is for :attr:`native`, where nothing else takes it."""
        return self.native is not None and position > 0 and seq_len <= MOST_ROWS

    @property
    def part_failed(self) -> bool:
        """Whether a frame raised in one of :attr:`parts` or :attr:`chunks`, or in :attr:`chunk`."""
        return any(part is not None and part.failed for part in (self.parts, self.chunks, self.chunk))

    def use_kernels(self, kernels: StepKernels) -> None:
        """Take steps through ``kernels`` from now on, or parts of steps and chunks, where layers can be run so."""
        self.drop_kernels()
        self.kernels = kernels
        if self.may_step_native:
            self.native = native_step(self._base, self._layers, self.new_cache(), kernels)
        if may_have_parts(self._layers):
            self.parts = NativeParts(self._layers, kernels)
        if may_have_chunks(self._with_head):
            room = ChunkRoom()
            self.chunks = NativeChunks(self._with_head, kernels, room)
            if self._is_quick:
                self.chunk = native_chunk(self._base, self._layers, self.new_cache(), kernels, room)

    def drop_kernels(self) -> None:
        """Take steps and chunks plainly again."""
        self.native = self.chunk = self.kernels = None
        if self.chunks is not None:
            self.chunks.leave()
        self.chunks = None
        if self.parts is not None:
            self.parts.leave()
        self.parts = None

    def forward(
        self,
        inputs: torch.Tensor,
        *,
        position: int,
        cache: DynamicCache | None,
        sample: int,
        cancelled: Callable[[], bool],
        plain: bool = False,
    ) -> torch.Tensor:
        """Run the layers over one frame.

        Args:
            inputs: token ids, int64 ``[1, seq_len]``, or hidden states ``[1, seq_len, hidden]``.
            position: positions before the first of them.
            cache: what :meth:`new_cache` gave, filled with exactly ``position`` positions; None for the stateless path.
            sample: trailing positions to project to logits; 0 for none.
            cancelled: looked at before each layer.
            plain: leave aside whatever is not the model's own or quick layers.

        Returns:
            Hidden states ``[1, seq_len, hidden]`` if ``sample`` is 0, else logits ``[1, sample, vocab]``.

        Raises:
            ForwardCancelledError: some layers of ``cache`` may have advanced.
        """
        seq_len = inputs.shape[1]
        if self._steps_only and cache is not None and position > 0 and seq_len > 1:
            steps = [
                self.forward(
                    inputs[:, at : at + 1],
                    position=position + at,
                    cache=cache,
                    sample=1 if at >= seq_len - sample else 0,
                    cancelled=cancelled,
                    plain=plain,
                )
                for at in range(seq_len)
            ]
            return torch.cat(steps[-sample:], dim=1)  # all of them where sample is 0
        step = None
        if self.parts is not None:
            self.parts.turn(on=not plain and cache is not None)
        if self.chunks is not None:
            self.chunks.is_on = not plain and cache is not None
        if cache is not None and not plain and position > 0:
            if seq_len == 1 and self.step is not None and self.step.takes(cache):
                step = self.step
            elif (native := self.native) is not None and seq_len <= MOST_ROWS:
                at = range(position, position + seq_len)
                rows = inputs.transpose(0, 1)  # each position sees those before it in the session's own slots
                found = self._run_native(native, rows, at, [cache] * seq_len, sample, cancelled)
                return found.transpose(0, 1)
        if cache is not None and not plain and seq_len > MOST_ROWS and self.chunk is not None:
            out = self._run_chunk(self.chunk, inputs, position, cache, sample, cancelled)
            if out is not None:
                return out
        positions = torch.arange(position, position + seq_len, device=inputs.device).unsqueeze(0)
        return self._run(inputs, positions, self._masks(seq_len), cache, sample, cancelled, step)

    def forward_together(
        self,
        inputs: torch.Tensor,
        *,
        positions: Sequence[int],
        caches: Sequence[DynamicCache],
        sample: bool,
        cancelled: Callable[[], bool],
    ) -> torch.Tensor:
        """Run the layers over the newest position of each of several sessions: one product with each weight for all.

        Args:
            inputs: token ids, int64 ``[sessions, 1]``, or hidden states ``[sessions, 1, hidden]``.
            positions: of each session, how many came before; at least 1.
            caches: of each, filled with exactly as many.
            sample: project the positions to logits.
            cancelled: looked at before each layer; ends the forward for all.

        Returns:
            Hidden states ``[sessions, 1, hidden]``, or logits ``[sessions, 1, vocab]``.

        Raises:
            ForwardCancelledError: some layers of ``caches`` may have advanced, as after any other exception.
        """
        if self.parts is not None:
            self.parts.turn(on=True)
        if self.chunks is not None:
            self.chunks.is_on = True
        if (native := self.native) is not None:
            rows = len(positions) if sample else 0
            return self._run_native(native, inputs, positions, caches, rows, cancelled)
        at = torch.tensor(positions, device=inputs.device).unsqueeze(1)
        cache = RaggedCache(caches, self.parts.apart(caches) if self.parts is not None else ())
        own = self.config._attn_implementation
        self.config._attn_implementation = self._ragged
        try:
            output = self._run(inputs, at, self._no_masks, cache, int(sample), cancelled)
        finally:
            self.config._attn_implementation = own
        cache.give_back()
        return output.reshape(len(positions), 1, output.shape[-1])

    def _run(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        masks: dict[str, None] | None,
        cache: DynamicCache | None,
        sample: int,
        cancelled: Callable[[], bool],
        step: StepTree | None = None,
    ) -> torch.Tensor:
        arguments: dict[str, Any] = {
            "input_ids" if inputs.dim() == 2 else "inputs_embeds": inputs,
            "position_ids": positions,
            "attention_mask": masks,
            "cache": cache,
            "use_cache": cache is not None,
        }
        if self._grouped_experts and inputs.device.type != "cpu":
            # As transformers' generate() does: grouped products are slow for one position on an accelerator.
            self.config._experts_implementation = "batched_mm" if positions.shape[1] == 1 else "grouped_mm"
        self._cancelled = cancelled
        model, base = (self.model, self._base) if step is None else (step.model, step.base)
        try:
            if self._is_quick and positions.shape[1] == 1 and self._step_needs_no_mask:
                return self._run_step(inputs, positions, cache, sample, self._layers if step is None else step.layers)
            if sample:
                logits: torch.Tensor = model(**arguments, logits_to_keep=sample).logits
                return logits
            hidden: torch.Tensor = base(**arguments).last_hidden_state
            return hidden
        finally:
            self._cancelled = None

    def _run_step(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        cache: DynamicCache | None,
        sample: int,
        layers: Sequence[nn.Module],
    ) -> torch.Tensor:
        """Quick layers over single positions: what the model's own forward comes to, without what it looks at."""
        base: Any = self._base
        hidden: torch.Tensor = base.embed_tokens(inputs) if inputs.dim() == 2 else inputs
        turns, attend = base.rotary_emb(hidden, positions), attention_of(self.config)
        for layer in layers:
            self.look_at_cancel()
            hidden = layer.forward(hidden, None, turns, cache, attend)
        hidden = base.norm(hidden)
        return self.model.lm_head(hidden) if sample else hidden

    def _run_native(
        self,
        native: NativeStep,
        inputs: torch.Tensor,
        positions: Sequence[int],
        caches: Sequence[DynamicCache],
        sample: int,
        cancelled: Callable[[], bool],
    ) -> torch.Tensor:
        """Rows of one position each, of which the last ``sample`` are projected."""
        self._cancelled = cancelled
        try:
            hidden = native.run(inputs, positions, caches, self.look_at_cancel)
            if not sample:
                return hidden
            logits: torch.Tensor = self.model.lm_head(hidden[-sample:])
            return logits.reshape(sample, 1, logits.shape[-1])
        finally:
            self._cancelled = None

    def _run_chunk(
        self,
        chunk: NativeChunk,
        inputs: torch.Tensor,
        position: int,
        cache: DynamicCache,
        sample: int,
        cancelled: Callable[[], bool],
    ) -> torch.Tensor | None:
        self._cancelled = cancelled
        try:
            hidden = chunk.run(inputs, position, cache, self.look_at_cancel)
            return self.model.lm_head(hidden[:, -sample:]) if sample and hidden is not None else hidden
        finally:
            self._cancelled = None

    def _masks(self, seq_len: int) -> dict[str, None] | None:
        """Ready masks where none is needed; None lets the model make its own.

        A single newest position may see all it is given. Layers without attention take no mask in any frame, since
        frames are never padded, and a model without any attention layer could not make one.
        """
        if not self._attends or (seq_len == 1 and self._step_needs_no_mask):
            return self._no_masks
        return None

    def look_at_cancel(self) -> None:
        """Called before each layer.

        Raises:
            ForwardCancelledError: the frame that runs was cancelled.
        """
        if self._cancelled is not None and self._cancelled():
            raise ForwardCancelledError(f"forward of layers {self.layers} was cancelled")


def _lay_dense(_module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The positions to project, without gaps between them.

    ``logits_to_keep`` cuts them out of the frame's as a strided view; for one whose weights need no gradient torch then
    takes a batched product, and copies the whole projection for it: 24 times the time of a prefill's tail on
    Qwen2.5-0.5B's shape. ``contiguous()`` would keep the stride of a dimension of length 1.
    """
    return (arguments[0].reshape(-1, arguments[0].shape[-1]).unsqueeze(0), *arguments[1:])
