"""Whether this machine's C compiler, if it has one, can build something that needs its library's headers."""

from __future__ import annotations

import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from meshnet_core.errors import MeshnetError
from meshnet_node.step_kernels import compiler


@cache
def compiles() -> bool:
    """Not by what is tested: a fault of that must not look like a machine without a compiler."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "least.c"
        source.write_text("#include <math.h>\nfloat least(float x) { return sqrtf(x); }\n", "utf-8")
        try:
            command = [*compiler(), "-shared", "-fPIC", str(source), "-o", str(source.with_suffix(".so")), "-lm"]
            return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 0
        except (MeshnetError, OSError, subprocess.SubprocessError):
            return False


needs_compiler = pytest.mark.skipif(not compiles(), reason="no C compiler that works")
