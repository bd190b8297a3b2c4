"""The small operations of a decode step as C code, built by this machine's own compiler and checked before use.

A step's norms, rotations, attention and gates are some forty operations of torch a layer, each a few thousand values:
most of their time is the way to them, through code that the weights have driven out of the caches. ``step_kernels.c``
has them as functions, and what experts do; ``step_products.c`` products of a step's rows, and ``step_attention.c``
a position's attention; ``chunk_products.c`` and ``chunk_attention.c`` those of chunks. Built in some seconds, once
for a processor and a compiler, and kept in the cache folder. Where there is no compiler, or what it made does not give
what torch gives, there are none, and a step runs as before. Knows no tensors and no modules.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from meshnet_core.errors import UnsupportedModelError
from meshnet_node.atomic_file import remove_stale, renamed_when_done
from meshnet_node.cache_folder import default_cache_dir, writing_to_cache
from meshnet_node.kernel_check import check
from meshnet_node.kernel_library import StepKernels
from meshnet_node.processor_name import processor_name

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
# Here sums may be made in any order, as torch's are; all else is as the language has it.
_IN_ANY_ORDER = ("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math")
SOURCES = {
    _HERE / "step_kernels.c": _IN_ANY_ORDER,
    _HERE / "step_attention.c": _IN_ANY_ORDER,
    _HERE / "step_products.c": (),
    _HERE / "chunk_rows.c": _IN_ANY_ORDER,
    _HERE / "chunk_products.c": (),
    _HERE / "chunk_attention.c": (),
}
"""Each with flags of its own."""
_NAMES = ("parallel.h", "row_values.h", "row_ops.h", "few_rows.h", "matrix.h", "step_attention.h", "chunk_tile.h")
HEADERS = tuple(_HERE / name for name in _NAMES)
FLAGS = ("-O3", "-fno-math-errno", "-fPIC")
_NATIVE = ("-march=native", "-mcpu=native")  # the first that the compiler takes
_COMPILERS = ("cc", "gcc", "clang")
_BUILD_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class KernelsHere:
    """This machine's kernels, or the reason why there are none."""

    kernels: StepKernels | None
    reason: str = ""


def step_kernels() -> StepKernels | None:
    """This machine's; see :func:`kernels_here`."""
    return kernels_here().kernels


@cache
def kernels_here() -> KernelsHere:
    """Build and check them where they are not yet; where they cannot be had, the log says so once."""
    try:
        path, is_new = _built()
        try:
            return KernelsHere(_checked(path))
        except Exception:
            if is_new:
                raise
        path.unlink(missing_ok=True)  # damaged, or of another system that shares the folder
        return KernelsHere(_checked(_built()[0]))
    except Exception as error:  # noqa: BLE001 - whatever is odd about a compiler, a node serves without it
        logger.info("steps and chunks are torch's alone: %s", error)
        return KernelsHere(None, str(error))


def _checked(path: Path) -> StepKernels:
    kernels = StepKernels(path)
    check(kernels)
    return kernels


def compiler() -> list[str]:
    """The command of the C compiler: what CC says, with its arguments, or the first that is found.

    Raises:
        UnsupportedModelError: there is none.
    """
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise UnsupportedModelError(f"CC is no command: {error}") from error
    for name, *arguments in [named] if named else [[each] for each in _COMPILERS]:
        if path := shutil.which(name):
            return [path, *arguments]
    if named:
        raise UnsupportedModelError(f"CC names {named[0]}, which is not on the path")
    raise UnsupportedModelError("there is no C compiler on the path; cc, or what CC names, makes them quicker")


def _built() -> tuple[Path, bool]:
    """The library, from the cache folder or built; and whether it was built now.

    Raises:
        UnsupportedModelError: there is no compiler, or it fails, and what it said.
        InvalidInputError: the cache folder cannot be written to.
    """
    command = compiler()
    sources = [(source.read_bytes(), flags) for source, flags in SOURCES.items()]
    headers = [header.read_bytes() for header in HEADERS]
    made_of = (sources, headers, FLAGS, _NATIVE, command, Path(command[0]).stat().st_mtime_ns, processor_name())
    target = default_cache_dir() / "kernels" / f"{hashlib.sha256(repr(made_of).encode()).hexdigest()[:32]}.so"
    if target.is_file():
        return target, False
    with writing_to_cache():
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_stale(target.parent)
        with renamed_when_done(target) as partial:
            _build(command, partial)
    return target, True


def _build(command: list[str], target: Path) -> None:
    complaints = []
    with tempfile.TemporaryDirectory() as folder:
        for native in _NATIVE:
            complaint = _build_for([*command, *FLAGS, native], Path(folder), target)
            if not complaint:
                return
            complaints.append(complaint)
    raise UnsupportedModelError(f"{' '.join(command)} cannot build them: {complaints[0]}")


def _build_for(command: list[str], folder: Path, target: Path) -> str:
    """What the compiler complains of; nothing once ``target`` is there."""
    objects = []
    for source, flags in SOURCES.items():
        objects.append(folder / f"{source.stem}.o")
        if complaint := _run([*command, *flags, "-c", str(source), "-o", str(objects[-1])], objects[-1]):
            return complaint
    return _run([*command, "-shared", *map(str, objects), "-o", str(target), "-lm"], target)


def _run(command: list[str], makes: Path) -> str:
    """What it complains of; nothing if it has made what it should."""
    ran = subprocess.run(  # noqa: S603 - the user's own compiler, and files of ours
        command, capture_output=True, text=True, errors="replace", timeout=_BUILD_TIMEOUT_S, check=False
    )
    if ran.returncode == 0 and makes.is_file():
        return ""
    lines = ran.stderr.strip().splitlines()
    return lines[-1] if lines else "it says nothing"
