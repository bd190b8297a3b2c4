"""How many CPU threads torch's operations take in the thread that calls them. Knows no lanes and no shards."""

from __future__ import annotations

import torch


def take_cpu_threads(count: int) -> None:
    """Have torch use ``count`` threads for what the calling thread computes, whatever other threads take.

    ``torch.set_num_threads`` alone does not: it sets the calling thread's number, and one of the process that every
    thread takes over at its first operation. So a thread that had computed nothing yet would lose its own number to
    whichever thread set one last. Asking for the number counts as an operation.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)
