"""Memory that kernels for chunks work in, kept from call to call, and the threads that they take. Knows no kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from meshnet_node.openmp import parallel_address

_ALIGNED = 64


class Team(NamedTuple):
    """How many threads, and the address of what runs them (:mod:`meshnet_node.openmp`); None for one thread alone."""

    threads: int
    parallel: int | None


def team_here() -> Team | None:
    """The calling thread's, as many as torch takes; None where torch's cannot be shared."""
    threads = torch.get_num_threads()
    parallel = parallel_address() if threads > 1 else None
    return None if threads > 1 and parallel is None else Team(threads, parallel)


class ChunkRoom:
    """Not for two calls at once."""

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.float32)

    def at(self, values: int) -> int:
        """Address of so many float32, a multiple of 64 bytes; what was there before is lost."""
        spare = _ALIGNED // self._held.itemsize
        if self._held.numel() < values + spare:
            self._held = torch.empty(values + spare, dtype=torch.float32)  # whatever the process' default is now
        return -(-self._held.data_ptr() // _ALIGNED) * _ALIGNED
