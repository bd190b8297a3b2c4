"""Facts about the machine and the software that figures depend on; nothing that names the machine or its paths."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import MutableMapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

PACKAGES = ("torch", "transformers", "aiohttp")
OPENMP = ("OMP_", "GOMP_", "KMP_", "MKL_")  # what begins so steers the threads of some libraries


def facts() -> dict[str, Any]:
    """JSON-ready: versions, processor, cores and how busy they are already."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        **{package: _version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "system": platform.system(),
        "processor": processor(),
        "cores": cores(),
        "load_before": None if load is None else round(load, 2),
    }


def clear_thread_settings(environ: MutableMapping[str, str] | None = None) -> dict[str, str]:
    """Take settings of OpenMP's threads out of this process's environment, and say which there were.

    Every system that is measured gets its own defaults, or what its own start command sets: a setting of the shell's
    would reach all of them, and suit some better than others.
    """
    environ = os.environ if environ is None else environ
    return {name: environ.pop(name) for name in sorted(environ) if name.startswith(OPENMP)}


def begin(width: int = 140) -> Console:
    """For the start of a benchmark: `clear_thread_settings`, and a console on standard error that tells of it.

    Args:
        width: where standard error is no terminal.
    """
    console = Console(stderr=True, width=None if sys.stderr.isatty() else width)
    if cleared := clear_thread_settings():
        settings = " ".join(f"{name}={value}" for name, value in cleared.items())
        console.print(f"left out of the environment, so that each system has its own defaults: {settings}", style="dim")
    return console


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The processor's model as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
