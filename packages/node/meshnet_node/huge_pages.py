"""Weights in huge pages, where the system has them: Linux on a CPU, from 6.1 on.

A decode step reads every weight once, in order. With pages of 4 KiB the processor looks up another address every 64
cache lines and stops reading ahead there; in pages of 2 MiB the same sum over memory took half of its time, on a
virtual machine, where looking up is dearest. `madvise(MADV_COLLAPSE)` copies what lies in small pages into a huge one
that takes their place, under the same address, so it does not matter who allocated it. Nothing depends on it: where it
is not to be had, all stays as it was.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

HUGE_PAGE_BYTES = 2 << 20
LEAST_COVER = 0.9
"""Of a huge page that weights must fill: what else lies in it is held as well from then on, be it used or not."""
TRIES = 8
"""Huge pages that fail before one succeeds, after which the rest are left alone: the system has none to give. One that
lies in part in another mapping, or in none, fails on any system."""

_MADV_COLLAPSE = 25


def into_huge_pages(tensors: Iterable[torch.Tensor]) -> int:
    """Put the memory of CPU tensors into huge pages where they fill one nearly.

    Takes some 2 ms for each that is not one yet. The tensors may be read meanwhile.

    Returns:
        How many huge pages hold them now; 0 where the system has none.
    """
    collapse = _collapse()
    if collapse is None:
        return 0
    done = failed = 0
    for page in covered_pages(map(_extent, tensors)):
        if collapse(page * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, _MADV_COLLAPSE) == 0:
            done += 1
        else:
            failed += 1
            if failed == TRIES and not done:
                return 0  # the kernel is older, or its memory too scattered
    return done


def covered_pages(extents: Iterable[tuple[int, int]], least: float = LEAST_COVER) -> list[int]:
    """Numbers of the huge pages that extents fill by at least ``least``, in order.

    Args:
        extents: address and bytes of each; those that overlap are the same one.
    """
    filled: Counter[int] = Counter()
    end = 0
    for address, nbytes in sorted(set(extents)):
        begin, end = max(address, end), max(address + nbytes, end)
        for page in range(begin // HUGE_PAGE_BYTES, -(-end // HUGE_PAGE_BYTES)):
            low, high = page * HUGE_PAGE_BYTES, (page + 1) * HUGE_PAGE_BYTES
            filled[page] += max(0, min(end, high) - max(begin, low))
    return sorted(page for page, nbytes in filled.items() if nbytes >= least * HUGE_PAGE_BYTES)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.device.type != "cpu":
        return 0, 0
    if tensor.is_mkldnn:  # in a layout of its own, that torch gives no storage for
        return int(torch.ops.mkldnn.data_ptr(tensor)), tensor.nbytes
    return tensor.data_ptr(), tensor.nbytes


@cache
def _collapse() -> Any:
    """The C library's `madvise`, or None where it knows no huge pages."""
    if not sys.platform.startswith("linux"):
        return None
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None:
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise
