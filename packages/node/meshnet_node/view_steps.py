"""The ways that decode steps of a shard's views take beside the plain one, compiled or native, until one fails.

Knows no frames and no locks: who has the views sees to it that nothing runs meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from meshnet_core.layer_range import LayerRange
from meshnet_node.compiled_step import CompiledLayer, CompiledStep
from meshnet_node.kernel_library import StepKernels
from meshnet_node.layer_view import LayerView

logger = logging.getLogger(__name__)


class ViewSteps:
    """Of one shard.

    Args:
        layers: that it holds.
    """

    def __init__(self, layers: LayerRange) -> None:
        self._layers = layers
        self._compiled: tuple[CompiledLayer, ...] = ()
        self._kernels: StepKernels | None = None

    def use_compiled(self, layers: Sequence[CompiledLayer], views: Iterable[LayerView]) -> None:
        """Have ``views``, and those to come, take steps through ``layers``, one for each of the shard's."""
        self._compiled = tuple(layers)
        for view in views:
            self.put(view)

    def use_kernels(self, kernels: StepKernels, views: Iterable[LayerView]) -> None:
        """Likewise, through ``kernels``, where layers can be run so."""
        self._kernels = kernels
        for view in views:
            self.put(view)

    def put(self, view: LayerView) -> None:
        """Give a view what the shard has."""
        if self._kernels is not None:
            view.use_kernels(self._kernels)
        if self._compiled:
            ours = self._compiled[view.layers.start - self._layers.start :]
            view.step = CompiledStep(view, ours, view.look_at_cancel)

    def clear(self, views: Iterable[LayerView]) -> None:
        """Let go of all of it."""
        self._compiled, self._kernels = (), None
        for view in views:
            view.step = None
            view.drop_kernels()

    def failed(
        self, position: int, seq_len: int, error: BaseException, views: Sequence[LayerView], *, together: bool = False
    ) -> None:
        """Layers of a frame failed that may have taken one of the ways: whatever is wrong, the plain one goes on.

        Args:
            position, seq_len: of the frame.
            error: that was raised.
            views: of the shard.
            together: whether steps of several sessions ran, which are never compiled.
        """
        if self._compiled and not together and seq_len == 1 and position > 0:
            logger.warning(
                "decode steps of layers %s are plain again, the compiled one failed: %r", self._layers, error
            )
            self._compiled = ()
            for view in views:
                view.step = None
        if any(view.takes_native(position, seq_len) or view.part_failed for view in views):
            self.drop_kernels(views, error)

    def drop_kernels(self, views: Iterable[LayerView], error: BaseException) -> None:
        """Let go of kernels, since a native step or chunk failed so."""
        logger.warning(
            "steps and chunks of layers %s are plain from now on, a native one failed: %r", self._layers, error
        )
        self._kernels = None
        for view in views:
            view.drop_kernels()
