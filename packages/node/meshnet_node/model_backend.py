"""The backend of a node: a shard run with torch.

Decode steps of several sessions run in one forward, which reads the weights once for all, and other frames one after
the other. Knows nothing of sessions' names, of the wire, or of sampling.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from meshnet_core.errors import (
    BadFrameError,
    CacheMissError,
    HopFailedError,
    InvalidInputError,
    MeshnetError,
    MissReason,
)
from meshnet_core.layer_range import LayerRange
from meshnet_node.compiled_step import CompiledLayer
from meshnet_node.device_choice import DTYPES, dtype_name
from meshnet_node.device_memory import give_back
from meshnet_node.family_support import Family, check_split
from meshnet_node.layer_slicing import ForwardCancelledError, LayerView
from meshnet_node.session_state import SessionState, walk_tensors
from meshnet_node.shard_work import ShardResult, ShardWork, never
from meshnet_node.state_cost import StateCosts, measured_costs
from meshnet_node.step_kernels import StepKernels, step_kernels
from meshnet_node.view_steps import ViewSteps
from meshnet_node.weight_packing import held_as

if TYPE_CHECKING:
    from meshnet_node.step_warm_up import StepWarmUp

logger = logging.getLogger(__name__)

_TOKEN_BYTES = 4  # int32
BATCH_LIMIT = 32  # decode steps in one forward: each one more adds its attention and little else


class TorchModelShard:
    """A :class:`~meshnet_node.shard_work.ShardBackend` over a pruned transformers model.

    Made by :func:`~meshnet_node.shard_loader.load_shard`.

    Args:
        model: pruned to ``layers`` and filled, on its device, in its dtype.
        layers: the range it holds.
        family: its entry in the registry.
    """

    def __init__(self, model: PreTrainedModel, layers: LayerRange, family: Family) -> None:
        config = model.config
        self.layers = layers
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self.model_type: str = config.model_type
        self.attn_implementation: str = config._attn_implementation
        self._compute_dtype = model.dtype
        self._device = model.device
        self.dtype = "+".join(filter(None, (dtype_name(model.dtype), held_as(model))))
        self.device = str(model.device)
        self.weight_bytes = held_bytes(model)
        self._model = model
        self._family = family
        self._views: dict[int, LayerView] = {}
        self._views_lock = threading.Lock()
        self._running = threading.Lock()
        self._closed = False
        self._steps = ViewSteps(layers)
        self.step_warm_up: StepWarmUp | None = None
        view = self._view(layers.start)
        self._costs = StateCosts(layers, measured_costs(view, self._one_position()))
        self.batch_limit = BATCH_LIMIT if view.runs_together else 1

    @property
    def is_first(self) -> bool:
        """Whether this shard embeds token ids."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether this shard norms and projects to logits."""
        return self.layers.stop == self.num_layers

    def new_state(self, start: int) -> SessionState:
        """See :class:`~meshnet_node.shard_work.ShardBackend`."""
        view = self._view(start)
        return SessionState(view.layers, view.new_cache())

    def batch_key(self, work: ShardWork) -> Hashable | None:
        """See :class:`~meshnet_node.shard_work.ShardBackend`.

        Decode steps: one position after others, on state, where no layer of the hop stands against it, and no drafts of
        the frame before.
        """
        is_step = work.seq_len == 1 and work.position > 0 and work.held is None and not work.verify
        is_step = is_step and work.state is not None and not work.state.has_way_back
        if self.batch_limit == 1 or work.exact or not is_step or work.start not in self.layers:
            return None
        try:
            return work.start if self._view(work.start).runs_together else None
        except MeshnetError:  # running it will tell why
            return None

    def forward(self, works: Sequence[ShardWork]) -> list[ShardResult | Exception]:
        """See :class:`~meshnet_node.shard_work.ShardBackend`."""
        results: dict[int, ShardResult | Exception] = {}
        for group in self._groups(works):
            together = {index: works[index] for index in group}
            with self._running:
                if len(group) > 1:
                    results |= self._attempt_together(together)
                else:
                    results |= {index: self._attempt(work) for index, work in together.items()}
        return [results[index] for index in range(len(works))]

    def _groups(self, works: Sequence[ShardWork]) -> list[list[int]]:
        """Indices of the frames, by the forward that each is part of."""
        groups: dict[Hashable, list[int]] = {}
        for index, work in enumerate(works):
            key = self.batch_key(work) if len(works) > 1 else None
            groups.setdefault(("alone", index) if key is None else ("together", key), []).append(index)
        return list(groups.values())

    def _attempt(self, work: ShardWork) -> ShardResult | Exception:
        try:
            return self._forward_one(work)
        except Exception as error:  # noqa: BLE001 - one frame's failure must not reach its neighbours
            return self._told(error, work.start)

    def _attempt_together(self, works: dict[int, ShardWork]) -> dict[int, ShardResult | Exception]:
        """Run frames of one ``batch_key``; what stands against one of them is found before any layer runs."""
        began = time.perf_counter()
        results: dict[int, ShardResult | Exception] = {}
        ready: dict[int, torch.Tensor] = {}
        for index, work in works.items():
            try:
                if self._closed:
                    raise HopFailedError(f"layers {self.layers} were unloaded before the frame ran")  # noqa: TRY301
                self._check(work)
                ready[index] = self._read(work)
                if work.cancelled():
                    raise ForwardCancelledError(f"the frame at position {work.position} was cancelled")  # noqa: TRY301
            except Exception as error:  # noqa: BLE001 - as above
                if isinstance(error, ForwardCancelledError) and work.state is not None:
                    work.state.spoil()  # as if it had been cancelled a moment later
                ready.pop(index, None)
                results[index] = self._told(error, work.start)
        if ready:
            ran = [works[index] for index in ready]
            try:
                outcomes = self._forward_together(ran, torch.cat(list(ready.values())), began)
            except Exception as error:  # noqa: BLE001 - as above
                outcomes = self._failed_together(ran, error)
            results |= zip(ready, outcomes, strict=True)
        return results

    def _failed_together(self, works: Sequence[ShardWork], error: Exception) -> list[ShardResult | Exception]:
        for work in works:
            if work.state is not None:
                work.state.spoil()
        self._step_failed(works[0].position, 1, error, together=True)
        return [self._told(error, work.start) for work in works]

    def _told(self, error: Exception, start: int) -> Exception:
        """The error that a caller gets for what a frame raised."""
        if isinstance(error, (MeshnetError, ForwardCancelledError)):
            return error
        failure = HopFailedError(f"forward of layers {start}-{self.layers.stop - 1} failed: {error!r}")
        failure.__cause__ = error
        return failure

    def state_bytes_per_position(self, start: int) -> int:
        """See :class:`~meshnet_node.shard_work.ShardBackend`."""
        return self._costs.bytes_per_position(start)

    def state_bytes(self, start: int, positions: int) -> int:
        """See :class:`~meshnet_node.shard_work.ShardBackend`."""
        return self._costs.bytes_after(start, positions)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules that a frame over all of the shard's layers runs, by torch's names for them."""
        return iter(self._view(self.layers.start).model.named_modules())

    def whole_view(self) -> LayerView:
        """The view of all its layers."""
        return self._view(self.layers.start)

    def its_turn(self) -> threading.Lock:
        """A lock that keeps frames out while it is held."""
        return self._running

    def warm_up(self, warm_up: StepWarmUp) -> None:
        """Start to make the compiled decode step in the background; :meth:`close` stops it."""
        self.step_warm_up = warm_up
        warm_up.start()

    def use_compiled(self, layers: Sequence[CompiledLayer]) -> None:
        """Take decode steps that need not be exact through ``layers``, one for each of the shard's."""
        with self._views_lock:
            if not self._closed:
                self._steps.use_compiled(layers, self._views.values())

    def use_kernels(self, find: Callable[[], StepKernels | None] = step_kernels) -> None:
        """Take decode steps that need not be exact through C kernels, where layers can be run so and there are some.

        Args:
            find: builds them where need be; asked only where layers may be run so.
        """
        kernels = find() if self._view(self.layers.start).may_run_native else None
        if kernels is None:
            return
        with self._running:
            if self._closed:
                return
            with self._views_lock:
                self._steps.use_kernels(kernels, self._views.values())
            try:
                self._run_two()  # what cannot run is found out before it serves
            except Exception as error:  # noqa: BLE001 - the plain steps serve
                self._step_failed(1, 1, error)

    @property
    def runs_compiled(self) -> bool:
        """Whether decode steps of one session go through compiled layers."""
        return self._view(self.layers.start).step is not None

    @property
    def runs_native(self) -> bool:
        """Whether decode steps go through kernels of C."""
        return self._view(self.layers.start).native is not None

    @torch.inference_mode()
    def _run_two(self) -> None:
        view, inputs = self._view(self.layers.start), self._one_position()
        cache, sample = view.new_cache(), int(self.is_last)
        for position in range(2):
            view.forward(inputs, position=position, cache=cache, sample=sample, cancelled=never)

    def _step_failed(self, position: int, seq_len: int, error: BaseException, *, together: bool = False) -> None:
        """A frame that need not be exact failed. What is told of in our own words is not the layers' fault."""
        if not isinstance(error, ForwardCancelledError | MeshnetError):
            with self._views_lock:
                self._steps.failed(position, seq_len, error, list(self._views.values()), together=together)

    def close(self) -> None:
        """See :class:`~meshnet_node.shard_work.ShardBackend`.

        The tensors are taken out of the modules: those refer to one another in circles, and a node has frozen some of
        them against the garbage collector, so that letting go of the model alone might free nothing.
        """
        if self.step_warm_up is not None:
            self.step_warm_up.stop()
        with self._running, self._views_lock:
            self._closed = True
            self._steps.clear(self._views.values())
            for model in (self._model, *(view.model for view in self._views.values())):
                for module in model.modules():
                    module._parameters.clear()
                    module._buffers.clear()
            self._views.clear()
        give_back(self._device)

    @torch.inference_mode()
    def _forward_one(self, work: ShardWork) -> ShardResult:
        began = time.perf_counter()
        if self._closed:
            raise HopFailedError(f"layers {self.layers} were unloaded before the frame ran")
        if work.held is not None and work.state is not None:
            work.state.begin_from(work.held, work.position)
        if work.state is not None and not work.state.spoiled and work.state.falls_back_to(work.position):
            work.state.fall_back(work.position)
        self._check(work)
        inputs = self._read(work)
        if work.state is not None:
            _keep_way_back(work.state, work)
        view = self._view(work.start)
        sample = work.sample if self.is_last else 0
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
            hidden = None if self.is_last else _to_wire(output, DTYPES[work.wire_dtype])
        except BaseException as error:
            if work.state is not None:
                work.state.spoil()
            if not work.exact:
                self._step_failed(work.position, work.seq_len, error)
            raise
        logits = output[0].float() if sample else None
        return ShardResult(hidden=hidden, logits=logits, seconds=time.perf_counter() - began)

    @torch.inference_mode()
    def _forward_together(
        self, works: Sequence[ShardWork], inputs: torch.Tensor, began: float
    ) -> list[ShardResult | Exception]:
        """Run frames that were checked, their inputs stacked; each row's outcome is its frame's alone."""
        states = [work.state for work in works if work.state is not None]
        sampled = self.is_last and any(work.sample for work in works)
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
                hidden = None if self.is_last else _to_wire(row, DTYPES[work.wire_dtype])
            except Exception as error:  # noqa: BLE001 - as above
                state.spoil()
                outcomes.append(self._told(error, work.start))
                continue
            logits = row[0].float() if self.is_last and work.sample else None
            outcomes.append(ShardResult(hidden=hidden, logits=logits, seconds=time.perf_counter() - began))
        return outcomes

    def _check(self, work: ShardWork) -> None:
        """Refuse, before any layer runs, what does not fit the shard or the state."""
        if work.start not in self.layers:
            raise BadFrameError(f"effective start {work.start} lies outside this shard's layers {self.layers}")
        if work.wire_dtype not in DTYPES:
            raise BadFrameError(f"wire dtype {work.wire_dtype!r} is unknown; it is one of {', '.join(DTYPES)}")
        if work.seq_len < 1 or work.position < 0 or not 0 <= work.sample <= work.seq_len:
            raise BadFrameError(
                f"seq_len {work.seq_len}, position {work.position}, sample {work.sample} make no frame: "
                "seq_len is at least 1, position at least 0, sample at most seq_len"
            )
        state = work.state
        if state is None:
            if work.position != 0:
                raise BadFrameError(f"a frame without state starts at position 0, not at {work.position}")
        elif state.spoiled:
            raise CacheMissError("an earlier forward of this state did not finish", reason=MissReason.FAILED)
        elif state.layers != self.layers.starting_at(work.start):
            raise CacheMissError(
                f"the state is of layers {state.layers}, the frame runs {self.layers.starting_at(work.start)}",
                reason=MissReason.RANGE_MISMATCH,
                position=state.position,
            )
        elif state.position != work.position:
            raise CacheMissError(
                f"the state stands at position {state.position}, the frame starts at {work.position}",
                reason=MissReason.POSITION_MISMATCH,
                position=state.position,
            )

    def _read(self, work: ShardWork) -> torch.Tensor:
        """The payload as a tensor on the device: int64 ids ``[1, seq_len]``, or hidden states in the compute dtype."""
        dtype = torch.int32 if work.start == 0 else DTYPES[work.wire_dtype]
        expected = work.seq_len * (_TOKEN_BYTES if work.start == 0 else self.hidden_size * dtype.itemsize)
        given = memoryview(work.payload).nbytes
        if given != expected:
            what = "int32 token ids" if work.start == 0 else f"{work.wire_dtype} hidden states of {self.hidden_size}"
            raise BadFrameError(f"payload has {given} bytes; {work.seq_len} positions of {what} take {expected}")
        flat = torch.frombuffer(bytearray(work.payload), dtype=dtype)
        if work.start > 0:
            return flat.view(1, work.seq_len, self.hidden_size).to(device=self._device, dtype=self._compute_dtype)
        return flat.view(1, work.seq_len).to(device=self._device, dtype=torch.int64)

    def _view(self, start: int) -> LayerView:
        with self._views_lock:
            if self._closed:
                raise HopFailedError(f"layers {self.layers} were unloaded")
            if start not in self._views:
                if start not in self.layers:
                    raise InvalidInputError(f"effective start {start} lies outside this shard's layers {self.layers}")
                check_split(self._model.config, self.layers.starting_at(start))
                self._views[start] = LayerView(self._model, self.layers, start, self._family)
                self._steps.put(self._views[start])
            return self._views[start]

    def _one_position(self) -> torch.Tensor:
        """As a frame's inputs are."""
        if self.is_first:
            return torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        return torch.ones(1, 1, self.hidden_size, dtype=self._compute_dtype, device=self._device)


def held_bytes(model: PreTrainedModel) -> int:
    """Bytes of a model's weights and buffers, those that share memory once."""
    storages = {}
    for tensor in walk_tensors([list(model.parameters()), list(model.buffers())]):
        if tensor.is_mkldnn:  # a packed weight lies in memory of its own, which torch gives no storage for
            storages[id(tensor)] = tensor.nbytes
            continue
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _keep_way_back(state: SessionState, work: ShardWork) -> None:
    if work.verify:
        state.keep_way_back(work.seq_len)
    else:
        state.let_go_of_way_back()


def _to_wire(hidden: torch.Tensor, dtype: torch.dtype) -> memoryview:
    """Hidden states as raw little-endian bytes; keeps the tensor alive instead of copying it once more."""
    sent = hidden.to(dtype)
    if dtype is torch.float16 and hidden.dtype is not torch.float16 and not bool(torch.isfinite(sent).all()):
        raise HopFailedError("hidden states overflow float16 on the wire; open the session with bfloat16 or float32")
    return sent.cpu().contiguous().view(torch.uint8).numpy().data.cast("B")
