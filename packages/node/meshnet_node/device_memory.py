"""How much memory a device has left, and giving back what is no longer used. Knows no models."""

from __future__ import annotations

import ctypes
import gc
import sys
from functools import cache
from typing import TYPE_CHECKING

import psutil
import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def free_bytes(device: torch.device) -> int:
    """Bytes that could be taken on ``device`` now: of a GPU its own memory, elsewhere this machine's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def give_back(device: torch.device) -> None:
    """Hand to the system what was freed and is kept for later.

    Modules refer to one another in circles, so what they hold goes when the garbage is collected. glibc keeps freed
    memory of up to 32 MiB a piece in its heap, and torch keeps a GPU's; other allocators are left to themselves.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim_heap()


def trim_heap() -> None:
    """Hand back freed memory that glibc keeps, without looking for garbage: a millisecond or so."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    # Not there with musl, say.
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim
