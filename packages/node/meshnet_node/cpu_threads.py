"""How many CPU threads torch's operations take in the thread that calls them, and where. Knows no lanes, no shards."""

from __future__ import annotations

import os
import sys

import torch


def take_cpu_threads(count: int) -> None:
    """Have torch use ``count`` threads for what the calling thread computes, whatever other threads take.

    ``torch.set_num_threads`` alone does not: it sets the calling thread's number, and one of the process that every
    thread takes over at its first operation. So a thread that had computed nothing yet would lose its own number to
    whichever thread set one last. Asking for the number counts as an operation.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)


def leave_core() -> None:
    """Let the calling thread, and the processes that it starts, run on any core that this process was given.

    Where threads are told their cores (`GOMP_CPU_AFFINITY`), libgomp puts the process's first thread on one as it is
    loaded, and all that are started later inherit that: the core on which steps are run.
    """
    cores = os.environ.get("GOMP_CPU_AFFINITY", "").split()
    if sys.platform == "linux" and cores and all(core.isdigit() for core in cores):
        os.sched_setaffinity(0, map(int, cores))
