"""Which thread of a process has its team of OpenMP threads. Knows no lanes, no shards.

GNU's OpenMP keeps a team for each thread that has computed with several: its workers spin for a while after each
product, and sleep until the next. If one process has more such threads than cores, as with two teams, workers spin no
more, and each product wakes them anew. So where what is computed moves from one thread to another, the team goes too:
the one ends its own, and the other's begins with its next product.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from meshnet_node.openmp import gnu_openmp

_PAUSE_SOFT = 1  # `omp_pause_soft`: what was set, the number of threads say, stays


class ThreadTeam:
    """Where the team is. Not safe for threads: whoever asks holds a lock.

    Args:
        end: ends the calling thread's team; None where one thread computes alone, which is no team.
    """

    def __init__(self, end: Callable[[], object] | None = None) -> None:
        self._end = end
        self._thread: int | None = None

    @property
    def is_elsewhere(self) -> bool:
        """Whether another thread than the calling one has it."""
        return self._thread not in (None, threading.get_ident())

    def take(self) -> None:
        """The calling thread is about to compute, and no other one has the team."""
        if self._end is not None:
            self._thread = threading.get_ident()

    def leave(self) -> None:
        """End it, if the calling thread has it."""
        if self._end is not None and self._thread == threading.get_ident():
            self._thread = None
            self._end()


def team_of(threads: int) -> ThreadTeam | None:
    """That of a process in which torch computes with ``threads`` threads; None where nothing is known to end it.

    That is so unless torch's OpenMP is GNU's, whose `omp_pause_resource_all` ends the team of the calling thread.
    """
    if threads == 1:
        return ThreadTeam()
    openmp = gnu_openmp()
    if openmp is None or not hasattr(openmp, "omp_pause_resource_all"):
        return None
    pause = openmp.omp_pause_resource_all
    pause.argtypes, pause.restype = [ctypes.c_int], ctypes.c_int
    return ThreadTeam(lambda: pause(_PAUSE_SOFT))
