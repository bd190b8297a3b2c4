"""Kernels whose products and attention of chunks are counted."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from meshnet_node.kernel_library import StepKernels
from meshnet_node.step_kernels import step_kernels


class NotingKernels:
    """This machine's kernels, whose products and attention of chunks are counted, and may raise.

    Attributes:
        calls: of each function, by name.
        fails: the one that raises.
    """

    def __init__(self) -> None:
        here = step_kernels()
        assert here is not None
        self.kernels: StepKernels = copy.copy(here)
        self.calls: Counter[str] = Counter()
        self.fails = ""
        for name in ("product", "few", "attend_chunk"):
            setattr(self.kernels, name, partial(self._called, name, getattr(here, name)))

    def _called(self, name: str, own: Callable[..., None], *arguments: Any) -> None:
        self.calls[name] += 1
        if name == self.fails:
            raise RuntimeError("planted")
        own(*arguments)

    def __call__(self) -> StepKernels:
        return self.kernels
