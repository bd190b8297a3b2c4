"""Whether this machine has the C kernels of decode steps, and where not, why: for those who ask before they load."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from meshnet_node import step_kernels as built
from meshnet_node.kernel_library import StepKernels


@dataclass(frozen=True, slots=True)
class KernelsHere:
    """The kernels, or the reason why there are none."""

    kernels: StepKernels | None
    reason: str = ""


def kernels_here(find: Callable[[], StepKernels | None] = built.step_kernels) -> KernelsHere:
    """Build and check them where they are not yet, which takes a second or two and writes to the cache folder.

    Args:
        find: tells the log why there are none, once in a process; a second call here has no reason to give.
    """
    heard = _Heard()
    log, level = built.logger, built.logger.level
    log.addHandler(heard)
    log.setLevel(logging.INFO)
    try:
        kernels = find()
    finally:
        log.setLevel(level)
        log.removeHandler(heard)
    return KernelsHere(kernels, "" if kernels is not None else heard.reason or "the log said why")


class _Heard(logging.Handler):
    """Keeps the newest message's reason."""

    reason = ""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        self.reason = message.partition(": ")[2] or message
