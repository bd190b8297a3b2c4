"""A name for what machine code runs on: it may not run on another processor that mounts the same folder."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """System, machine, and what the processor can do as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.system()} {platform.machine()} {platform.processor()} {features}"
