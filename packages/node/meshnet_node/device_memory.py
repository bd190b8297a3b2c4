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

_M_ARENA_MAX = -8  # of malloc.h
_WORTH_CPU_S = 0.1  # heartbeats take less between two looks, and any frames more


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
    if (trim := _glibc("malloc_trim")) is not None:
        trim(0)


def share_heap() -> None:
    """Let all threads that begin from now on take memory from one heap.

    glibc gives each of the first threads a heap of its own, and what is freed in one at its end stays there: trimming
    reaches the ends of the first heap alone. A node computes in one thread; there is nothing to gain from several.
    """
    if (mallopt := _glibc("mallopt")) is not None:
        mallopt(_M_ARENA_MAX, 1)


class IdleTrim:
    """Hands freed memory back at quiet moments, where there was work since the last.

    Args:
        cpu_seconds: that this process has taken, as ``time.process_time`` tells.
    """

    def __init__(self, cpu_seconds: Callable[[], float]) -> None:
        self._cpu_seconds = cpu_seconds
        self._trimmed_at = 0.0

    def look(self, *, idle: bool) -> bool:
        """Trim if nothing runs now and something did; whether it was done."""
        if not idle or self._cpu_seconds() - self._trimmed_at < _WORTH_CPU_S:
            return False
        trim_heap()
        self._trimmed_at = self._cpu_seconds()
        return True


@cache
def _glibc(name: str) -> Callable[..., int] | None:
    """A function of the C library for its heap; not there with musl, say."""
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return found
