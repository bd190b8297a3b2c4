"""A name for what machine code runs on: it may not run on another processor that mounts the same folder."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path


def processor_name() -> str:
    """System, machine, and what the processor can do as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    if platform.system() == "Darwin":
        features = _said_by("sysctl", "-n", "machdep.cpu.brand_string")
    return f"{platform.system()} {platform.machine()} {platform.processor()} {features}"


def _said_by(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return ""
