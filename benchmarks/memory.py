"""What the kernel counts for a process: the most memory it ever held, and the bytes it has read."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path


def peak_rss(pid: int) -> int | None:
    """The most bytes that a running process has held in memory; None where the system does not tell (not Linux)."""
    return _field(Path(f"/proc/{pid}/status"), "VmHWM:", scale=1024)


def rss(pid: int) -> int | None:
    """Bytes that a running process holds in memory now; None where the system does not tell (not Linux)."""
    return _field(Path(f"/proc/{pid}/status"), "VmRSS:", scale=1024)


def own_peak_rss() -> int:
    """The same for this process, on every POSIX system."""
    if (told := peak_rss(os.getpid())) is not None:
        return told
    # Not first: on Linux it begins with what the parent held before this program was executed.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def bytes_read() -> int | None:
    """Bytes that this process has read from files so far, whether or not they came from the page cache.

    Counts read calls, not mapped pages. None where the system does not tell.
    """
    return _field(Path("/proc/self/io"), "rchar:")


def _field(path: Path, name: str, *, scale: int = 1) -> int | None:
    try:
        lines = path.read_text("ascii", "replace").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(name):
            return int(line.split()[1]) * scale
    return None
