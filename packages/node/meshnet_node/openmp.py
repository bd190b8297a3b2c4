"""The OpenMP that torch computes with, where it is GNU's, and its team of threads. Knows no lanes, no shards."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any, NamedTuple

import torch


@cache
def gnu_openmp() -> Any:
    """The library, or None where torch's OpenMP is another, or a system's whose libraries are not looked through here.

    Whoever calls its functions shares torch's team of threads instead of having one beside it.
    """
    if sys.platform != "linux":
        return None
    openmp = ctypes.CDLL(torch._C.__file__)  # a name is looked up in the libraries that this one is linked with, too
    return None if hasattr(openmp, "__kmpc_fork_call") or not hasattr(openmp, "GOMP_parallel") else openmp


@cache
def parallel_address() -> int | None:
    """Of the function that runs a part of some work in each thread of the calling thread's team; None if unknown."""
    openmp = gnu_openmp()
    return None if openmp is None else ctypes.cast(openmp.GOMP_parallel, ctypes.c_void_p).value


class Team(NamedTuple):
    """How many threads, and the address of what runs them (:func:`parallel_address`); None for one thread alone."""

    threads: int
    parallel: int | None


def team_here() -> Team | None:
    """The calling thread's, as many as torch takes; None where torch's cannot be shared."""
    threads = torch.get_num_threads()
    parallel = parallel_address() if threads > 1 else None
    return None if threads > 1 and parallel is None else Team(threads, parallel)
