"""The backend of a node: a shard run with torch.

Has the weights, the views of its layers with the ways that steps take through them, and the lock under which a forward
runs. Decode steps of several sessions run in one, which reads the weights once for all, and other frames one after the
other; what becomes of each is :mod:`meshnet_node.frame_attempts`'. Knows nothing of sessions' names, of the wire, or of
sampling.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from meshnet_core.errors import HopFailedError, InvalidInputError, MeshnetError
from meshnet_core.layer_range import LayerRange
from meshnet_node.compiled_step import CompiledLayer
from meshnet_node.device_choice import dtype_name
from meshnet_node.device_memory import give_back
from meshnet_node.family_support import Family, check_split
from meshnet_node.frame_attempts import FrameAttempts
from meshnet_node.frame_tensors import FrameTensors
from meshnet_node.kernel_library import StepKernels
from meshnet_node.layer_view import ForwardCancelledError, LayerView
from meshnet_node.native_step import MOST_ROWS
from meshnet_node.session_state import SessionState, walk_tensors
from meshnet_node.shard_work import ShardResult, ShardWork, never
from meshnet_node.state_cost import StateCosts, measured_costs
from meshnet_node.step_kernels import step_kernels
from meshnet_node.view_steps import ViewSteps
from meshnet_node.weight_packing import held_as

if TYPE_CHECKING:
    from meshnet_node.step_warm_up import StepWarmUp

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
        self._tensors = FrameTensors(self.hidden_size, model.dtype, model.device)
        self._attempts = FrameAttempts(
            layers, is_last=self.is_last, tensors=self._tensors, view=self._view, on_failure=self._step_failed
        )
        self.step_warm_up: StepWarmUp | None = None
        view = self._view(layers.start)
        self._costs = StateCosts(layers, measured_costs(view, self._tensors.of_one_position(layers.start)))
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
            with self._running:
                results |= zip(group, self._attempt([works[index] for index in group]), strict=True)
        return [results[index] for index in range(len(works))]

    def _groups(self, works: Sequence[ShardWork]) -> list[list[int]]:
        """Indices of the frames, by the forward that each is part of."""
        groups: dict[Hashable, list[int]] = {}
        for index, work in enumerate(works):
            key = self.batch_key(work) if len(works) > 1 else None
            groups.setdefault(("alone", index) if key is None else ("together", key), []).append(index)
        return list(groups.values())

    def _attempt(self, works: Sequence[ShardWork]) -> list[ShardResult | Exception]:
        if self._closed:
            return [HopFailedError(f"layers {self.layers} were unloaded before the frame ran") for _ in works]
        return self._attempts.together(works) if len(works) > 1 else [self._attempts.alone(works[0])]

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
        """Take frames that need not be exact through C kernels, where layers can be run so and there are some.

        Args:
            find: builds them where need be; asked only where layers may be run so.
        """
        kernels = find() if self._view(self.layers.start).may_run_native else None
        if kernels is None:
            return
        with self._running:
            if self._closed:
                return
            try:
                with self._views_lock:
                    self._steps.use_kernels(kernels, self._views.values())
                self._try_out()  # what cannot run is found out before it serves
            except Exception as error:  # noqa: BLE001 - the plain steps serve
                with self._views_lock:
                    self._steps.drop_kernels(self._views.values(), error)

    @property
    def runs_compiled(self) -> bool:
        """Whether decode steps of one session go through compiled layers."""
        return self._view(self.layers.start).step is not None

    @property
    def runs_native(self) -> bool:
        """Whether decode steps go through kernels of C, or parts of them."""
        return self._view(self.layers.start).runs_native

    @torch.inference_mode()
    def _try_out(self) -> None:
        """A chunk that is longer than a step, and a step."""
        view, one = self.whole_view(), self._tensors.of_one_position(self.layers.start)
        cache, sample, position = view.new_cache(), int(self.is_last), 0
        for count in (MOST_ROWS + 1, 1):
            inputs = one.expand(1, count, *one.shape[2:]).contiguous()
            view.forward(inputs, position=position, cache=cache, sample=sample, cancelled=never)
            position += count

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
