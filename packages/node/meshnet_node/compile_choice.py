"""What ``--compile`` means on a machine. Pure but for looking at the machine; knows no models."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable

import torch

from meshnet_core.errors import InvalidInputError, UnsupportedModelError

COMPILE = ("auto", "off", "step")
"""The names that the option takes: ``auto`` is the small operations of decode steps by C code
(:mod:`meshnet_node.step_kernels`), ``step`` is torch's compiler for whole layers in decode steps of one session."""

_COMPILERS = ("c++", "g++", "clang++")


def compiles_steps(
    choice: str,
    device: torch.device,
    *,
    find: Callable[[str], str | None] = shutil.which,
    platform: str = sys.platform,
    free_threaded: bool = bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
) -> bool:
    """Whether decode steps are to be compiled by torch's compiler.

    Args:
        choice: one of :data:`COMPILE`.
        device: that the shard is on.
        find: the path of a program by its name; None where there is none.
        platform: as ``sys.platform``.
        free_threaded: whether this Python is built without a global lock.

    Raises:
        InvalidInputError: an unknown name.
        UnsupportedModelError: this machine cannot compile, and what it lacks.
    """
    if choice not in COMPILE:
        raise InvalidInputError(f"--compile {choice!r} is unknown; write {', '.join(COMPILE)}")
    if choice != "step":
        return False
    if (lacking := _lacking(device, find, platform, free_threaded=free_threaded)) is not None:
        raise UnsupportedModelError(f"--compile {choice} cannot be had here: {lacking}, or leave it out")
    return True


def _lacking(
    device: torch.device, find: Callable[[str], str | None], platform: str, *, free_threaded: bool
) -> str | None:
    if device.type not in ("cpu", "cuda"):
        return f"torch compiles for CPUs and CUDA alone, not for {device.type}; add --device cpu"
    if not platform.startswith("linux"):
        return f"it is made and tested on Linux alone, not on {platform}; run the node there"
    if free_threaded:
        return "torch's compiler needs a Python with a global lock; use a build without free threading"
    named = os.environ.get("CXX")
    if not any(find(name) for name in ([named] if named else _COMPILERS)):
        return "there is no C++ compiler on the path; install g++ (or name another one in CXX)"
    if not hasattr(torch._C, "_aoti"):
        return f"this torch ({torch.__version__}) was built without its ahead-of-time compiler; install one from pip"
    return None


def takes_kernels(choice: str) -> bool:
    """Whether the small operations of decode steps are to be C code, where that can be had."""
    return choice == "auto"
