"""Facts about the machine and the software that figures depend on; nothing that names the machine or its paths."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "aiohttp")


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
