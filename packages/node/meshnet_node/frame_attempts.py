"""What becomes of frames that a shard's layers are tried on: alone, or decode steps of several sessions in one forward.

Every frame has an outcome of its own, a result or an error, and so has its state: it advances, stays as it is where the
frame is refused before any layer runs, or is spoiled. Knows not which frames belong together, what other ways than the
plain one steps take, nor that a shard closes, and no locks; those are its caller's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from meshnet_core.errors import HopFailedError, MeshnetError
from meshnet_core.layer_range import LayerRange
from meshnet_node.frame_fit import check_fit
from meshnet_node.frame_tensors import FrameTensors, to_wire
from meshnet_node.layer_view import ForwardCancelledError, LayerView
from meshnet_node.session_state import SessionState
from meshnet_node.shard_work import ShardResult, ShardWork


class OnFailure(Protocol):
    """Told of frames that need not be exact, by position and length, whose layers raised; whether several together."""

    def __call__(self, position: int, seq_len: int, error: BaseException, *, together: bool = False) -> None: ...


class FrameAttempts:
    """Of one shard; one call at a time.

    Args:
        layers: that it holds.
        is_last: whether they end in logits.
        tensors: reads its frames.
        view: those of its layers that run from an effective start.
        on_failure: whose fault it was is looked at there.
    """

    def __init__(
        self,
        layers: LayerRange,
        *,
        is_last: bool,
        tensors: FrameTensors,
        view: Callable[[int], LayerView],
        on_failure: OnFailure,
    ) -> None:
        self._layers = layers
        self._is_last = is_last
        self._tensors = tensors
        self._view = view
        self._on_failure = on_failure

    def alone(self, work: ShardWork) -> ShardResult | Exception:
        """Run one frame."""
        try:
            return self._forward_one(work)
        except Exception as error:  # noqa: BLE001 - one frame's failure must not reach its neighbours
            return self._told(error, work.start)

    def together(self, works: Sequence[ShardWork]) -> list[ShardResult | Exception]:
        """Run frames of one ``batch_key``; what stands against one of them is found before any layer runs."""
        began = time.perf_counter()
        results: dict[int, ShardResult | Exception] = {}
        ready: dict[int, torch.Tensor] = {}
        for index, work in enumerate(works):
            try:
                check_fit(work, self._layers)
                inputs = self._tensors.read(work)
                if work.cancelled():
                    raise ForwardCancelledError(f"the frame at position {work.position} was cancelled")  # noqa: TRY301
            except Exception as error:  # noqa: BLE001 - as above
                if isinstance(error, ForwardCancelledError) and work.state is not None:
                    work.state.spoil()  # as if it had been cancelled a moment later
                results[index] = self._told(error, work.start)
            else:
                ready[index] = inputs
        if ready:
            ran = [works[index] for index in ready]
            try:
                outcomes = self._forward_together(ran, torch.cat(list(ready.values())), began)
            except Exception as error:  # noqa: BLE001 - as above
                outcomes = self._failed_together(ran, error)
            results |= zip(ready, outcomes, strict=True)
        return [results[index] for index in range(len(works))]

    def _failed_together(self, works: Sequence[ShardWork], error: Exception) -> list[ShardResult | Exception]:
        for work in works:
            if work.state is not None:
                work.state.spoil()
        self._on_failure(works[0].position, 1, error, together=True)
        return [self._told(error, work.start) for work in works]

    def _told(self, error: Exception, start: int) -> Exception:
        """The error that a caller gets for what a frame raised."""
        if isinstance(error, (MeshnetError, ForwardCancelledError)):
            return error
        failure = HopFailedError(f"forward of layers {start}-{self._layers.stop - 1} failed: {error!r}")
        failure.__cause__ = error
        return failure

    @torch.inference_mode()
    def _forward_one(self, work: ShardWork) -> ShardResult:
        began = time.perf_counter()
        if work.held is not None and work.state is not None:
            work.state.begin_from(work.held, work.position)
        if work.state is not None and not work.state.spoiled and work.state.falls_back_to(work.position):
            work.state.fall_back(work.position)
        check_fit(work, self._layers)
        inputs = self._tensors.read(work)
        if work.state is not None:
            _keep_way_back(work.state, work)
        view = self._view(work.start)
        sample = work.sample if self._is_last else 0
        try:
            output = view.forward(
                inputs,
                position=work.position,
                cache=None if work.state is None else work.state.cache,
                sample=sample,
                cancelled=work.cancelled,
                plain=work.exact,
            )
            if work.state is not None:
                work.state.advance(work.seq_len)
            hidden = None if self._is_last else to_wire(output, work.wire_dtype)
        except BaseException as error:
            if work.state is not None:
                work.state.spoil()
            if not work.exact:
                self._on_failure(work.position, work.seq_len, error)
            raise
        logits = output[0].float() if sample else None
        return ShardResult(hidden=hidden, logits=logits, seconds=time.perf_counter() - began)

    @torch.inference_mode()
    def _forward_together(
        self, works: Sequence[ShardWork], inputs: torch.Tensor, began: float
    ) -> list[ShardResult | Exception]:
        """Run frames that were checked, their inputs stacked; each row's outcome is its frame's alone."""
        states = [work.state for work in works if work.state is not None]
        sampled = self._is_last and any(work.sample for work in works)
        output = self._view(works[0].start).forward_together(
            inputs,
            positions=[work.position for work in works],
            caches=[state.cache for state in states],
            sample=sampled,
            cancelled=lambda: all(work.cancelled() for work in works),
        )
        outcomes: list[ShardResult | Exception] = []
        for work, state, row in zip(works, states, torch.split(output, 1), strict=True):
            state.advance(work.seq_len)
            try:
                if work.cancelled():
                    raise ForwardCancelledError(f"the frame at position {work.position} was cancelled")  # noqa: TRY301
                hidden = None if self._is_last else to_wire(row, work.wire_dtype)
            except Exception as error:  # noqa: BLE001 - as above
                state.spoil()
                outcomes.append(self._told(error, work.start))
                continue
            logits = row[0].float() if self._is_last and work.sample else None
            outcomes.append(ShardResult(hidden=hidden, logits=logits, seconds=time.perf_counter() - began))
        return outcomes


def _keep_way_back(state: SessionState, work: ShardWork) -> None:
    if work.verify:
        state.keep_way_back(work.seq_len)
    else:
        state.let_go_of_way_back()
