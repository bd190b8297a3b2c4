"""How busy the processors were meanwhile: with what is measured, and with anything else, which spoils the figures."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

import psutil

QUIET_CORES = 0.1  # other work of more than this many processors makes speeds doubtful


class BusyWatch:
    """Processors in use while the block runs, in processors: 2.0 is two of them all the time.

    Attributes:
        ours: by this process and its children.
        elsewhere: by everything else on the machine.
    """

    def __init__(self) -> None:
        self.ours = self.elsewhere = 0.0
        self._before = (0.0, 0.0, 0.0)

    def __enter__(self) -> Self:
        self._before = _now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        (wall, machine, own), (wall_before, machine_before, own_before) = _now(), self._before
        took = max(wall - wall_before, 1e-6)
        self.ours = (own - own_before) / took
        self.elsewhere = max(0.0, (machine - machine_before) / took - self.ours)

    def to_json(self) -> dict[str, float]:
        return {"busy_cores": round(self.ours, 2), "busy_elsewhere": round(self.elsewhere, 2)}


def _now() -> tuple[float, float, float]:
    """Wall clock, processor seconds of the machine, and of this process with its children; in seconds."""
    times = psutil.cpu_times()
    # Guests are counted in user time already; what the host took away was no use to anybody here, but was lost.
    idle = times.idle + getattr(times, "iowait", 0.0)
    counted = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    me = psutil.Process()
    own = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            spent = process.cpu_times()
        except psutil.Error:  # it ended just now
            continue
        own += spent.user + spent.system
    return time.perf_counter(), counted - idle, own
