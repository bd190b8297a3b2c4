"""transformers' own progress bars, switched off for a while: they show tensors and layers, and would garble ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging as transformers_logging


@contextmanager
def no_bars() -> Iterator[None]:
    """Without them while the block runs; afterwards as before."""
    bars: Any = transformers_logging  # untyped
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
