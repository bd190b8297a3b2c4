"""The small operations of a decode step as C code, built by this machine's own compiler and checked before use.

A step's norms, rotations, attention and gates are some forty operations of torch a layer, each a few thousand values:
most of their time is the way to them, through code that the weights have driven out of the caches. ``step_kernels.c``
has them as six functions. Built in some seconds, once for a processor and a compiler, and kept in the cache folder.
Where there is no compiler, or what it made does not give what torch gives, there are none, and a step runs as before.
Knows tensors' addresses, no modules.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from meshnet_core.errors import UnsupportedModelError
from meshnet_node.atomic_file import remove_stale, renamed_when_done
from meshnet_node.cache_folder import default_cache_dir, writing_to_cache
from meshnet_node.processor_name import processor_name

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("step_kernels.c")
FLAGS = (
    # The sums may be made in any order, as torch's are; all else is as the language has it.
    *("-O3", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
    *("-shared", "-fPIC"),
)
MOST_HEADS, MOST_WIDTH = 4, 512
"""Heads that attend together, and the widest that can: as the source has them."""

_NATIVE = ("-march=native", "-mcpu=native")  # the first that the compiler takes
_COMPILERS = ("cc", "gcc", "clang")
_BUILD_TIMEOUT_S = 60


class AttentionShape(ctypes.Structure):
    """What an attention layer is to :meth:`StepKernels.attend`; held by whoever passes its address.

    ``head_norm``: address of bfloat16 ``[heads + key_heads, width]``, or None; ``turns``: whether rope is applied;
    ``eps``: of the heads' norms.
    """

    _fields_ = (
        *(("head_norm", c_void_p), ("heads", c_int), ("key_heads", c_int), ("width", c_int), ("turns", c_int)),
        *(("scaling", c_float), ("eps", c_float)),
    )


class StepKernels:
    """The functions of one library. Arguments are addresses of dense bfloat16 tensors, unless it says otherwise.

    The interpreter's lock is kept meanwhile: they take microseconds, but for `attend_long`.

    Attributes:
        norm: ``(x, weight, out, rows, width, eps)``: transformers' RMS norm of each row.
        add: ``(x, other, count)``: ``x += other``.
        add_norm: ``(x, other, weight, out, rows, width, eps)``: both, one after the other.
        silu_mul: ``(gate_up, out, rows, width)``: ``silu(gate) * up`` of rows ``[gate, up]``.
        attend: ``(shape, qkv, cosines, sines, keys, values, key_stride, value_stride, positions, scores, out)``: one
            session's newest position. Queries and keys are normed and turned where they are; keys and values go to the
            last of ``positions`` rows of their slot, ``[key_heads, positions, width]`` with that many values from head
            to head; ``out`` ``[heads, width]`` is what attention gives, or None for none. The first half of ``sines``
            is negated. ``scores``: room for ``MOST_HEADS * positions`` float32.
        attend_long: the same, and other threads may run meanwhile.
        take: ``(codes, scales, out, groups, planes, half, byte, shift, stride)``: one row of a packed matrix. ``codes``
            is of its block (uint8, ``half`` bytes a column, the row's at ``byte``, by ``shift`` bits), ``scales`` of
            its first group (the next one's are ``stride`` values on).
    """

    def __init__(self, path: Path) -> None:
        library: Any = ctypes.PyDLL(str(path))
        p, n, f = c_void_p, c_int, c_float
        self.norm = _bound(library.meshnet_norm, p, p, p, n, n, f)
        self.add = _bound(library.meshnet_add, p, p, n)
        self.add_norm = _bound(library.meshnet_add_norm, p, p, p, p, n, n, f)
        self.silu_mul = _bound(library.meshnet_silu_mul, p, p, n, n)
        self.take = _bound(library.meshnet_take, p, p, p, n, n, n, n, n, c_int64)
        attended = (POINTER(AttentionShape), p, p, p, p, p, c_int64, c_int64, n, p, p)
        self.attend = _bound(library.meshnet_attend, *attended)
        self.attend_long = _bound(ctypes.CDLL(str(path)).meshnet_attend, *attended)


def _bound(function: Any, *arguments: Any) -> Any:
    function.argtypes, function.restype = arguments, None
    return function


@cache
def step_kernels() -> StepKernels | None:
    """This machine's, built where they are not yet; None where they cannot be had, which is said once in the log."""
    try:
        path, is_new = _built()
        try:
            return _checked(path)
        except Exception:
            if is_new:
                raise
        path.unlink(missing_ok=True)  # damaged, or of another system that shares the folder
        return _checked(_built()[0])
    except Exception as error:  # noqa: BLE001 - whatever is odd about a compiler, a node serves without it
        logger.info("small operations of decode steps are torch's: %s", error)
        return None


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
    made_of = (SOURCE.read_bytes(), FLAGS, _NATIVE, command, Path(command[0]).stat().st_mtime_ns, processor_name())
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
    said = ""
    for native in _NATIVE:
        ran = subprocess.run(  # noqa: S603 - the user's own compiler, and a file of ours
            [*command, *FLAGS, native, str(SOURCE), "-o", str(target), "-lm"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_BUILD_TIMEOUT_S,
            check=False,
        )
        if ran.returncode == 0 and target.is_file():
            return
        said = said or ran.stderr.strip()
    raise UnsupportedModelError(
        f"{' '.join(command)} cannot build them: {said.splitlines()[-1] if said else 'it says nothing'}"
    )


def check(kernels: StepKernels) -> None:
    """Compare what ``kernels`` give with what torch gives, on numbers that are always the same.

    Raises:
        UnsupportedModelError: something differs by more than rounding.
    """
    draw = torch.Generator().manual_seed(0)
    rows, width, eps = 3, 80, 1e-5
    inputs, other, gates = (_drawn(draw, rows, columns) for columns in (width, width, 2 * width))
    weight, out, summed = _drawn(draw, width), torch.empty_like(inputs), inputs.clone()
    kernels.norm(inputs.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, eps)
    _same("norm", out, functional.rms_norm(inputs, (width,), None, eps) * weight)
    kernels.add_norm(summed.data_ptr(), other.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, eps)
    _same("sum", summed, inputs + other)
    _same("norm of a sum", out, functional.rms_norm(summed, (width,), None, eps) * weight)
    kernels.add(summed.data_ptr(), other.data_ptr(), summed.numel())
    _same("second sum", summed, inputs + other + other)
    kernels.silu_mul(gates.data_ptr(), out.data_ptr(), rows, width)
    _same("gate", out, functional.silu(gates[:, :width]) * gates[:, width:])
    for heads, key_heads, width, turns in ((6, 2, 64, 1), (5, 1, 128, 0), (2, 2, 24, 1)):
        _check_attention(kernels, draw, AttentionShape(None, heads, key_heads, width, turns, width**-0.5, eps))
    _check_take(kernels, draw)


def _check_attention(kernels: StepKernels, draw: torch.Generator, shape: AttentionShape) -> None:
    """With norms of heads where it has rope."""
    heads, key_heads, width, positions = shape.heads, shape.key_heads, shape.width, 37
    projected, weight = _drawn(draw, heads + 2 * key_heads, width), _drawn(draw, heads + key_heads, width)
    cosines, sines = _drawn(draw, width), _drawn(draw, width)
    turned, value = projected[:-key_heads], projected[-key_heads:].clone()
    if shape.turns:
        shape.head_norm = weight.data_ptr()
        turned = functional.rms_norm(turned, (width,), None, shape.eps) * weight
        turned = turned * cosines + turned.roll(width // 2, -1) * sines
    query, key = turned[:heads].clone(), turned[heads:].clone()
    keys, values = (_drawn(draw, key_heads, positions + 3, width) for _ in range(2))
    scores, found = torch.empty(MOST_HEADS * positions), torch.empty(heads, width, dtype=torch.bfloat16)
    kernels.attend(
        *(shape, projected.data_ptr(), cosines.data_ptr(), sines.data_ptr(), keys.data_ptr(), values.data_ptr()),
        *(keys.stride(0), values.stride(0), positions, scores.data_ptr(), found.data_ptr()),
    )
    _same("new keys and values", torch.cat([keys[:, positions - 1], values[:, positions - 1]]), torch.cat([key, value]))
    attended = functional.scaled_dot_product_attention(
        query.float().view(1, heads, 1, width),
        keys[:, :positions].float().unsqueeze(0),
        values[:, :positions].float().unsqueeze(0),
        enable_gqa=True,
    )
    _same("attention", found, attended.view(heads, width).bfloat16())


def _check_take(kernels: StepKernels, draw: torch.Generator) -> None:
    """Of a block of four rows, two a byte, and two groups of 32 columns: the row at byte 1, in its upper half."""
    groups, half, group = 2, 2, 32
    for planes in (1, 2):
        codes = torch.randint(0, 256, (groups, planes, group, half), generator=draw, dtype=torch.uint8)
        scales, out = _drawn(draw, groups, 4, 2), torch.empty(groups, group, dtype=torch.bfloat16)
        at = (codes.data_ptr(), scales[:, 3].data_ptr(), out.data_ptr())
        kernels.take(*at, groups, planes, half, 1, 4, scales.stride(0))
        own = (codes[..., 1] >> 4).float()
        scale, zero = scales[:, 3, :1].float(), scales[:, 3, 1:].float()
        wanted = (own[:, 0] - 8) * scale + zero if planes == 1 else (16 * own[:, 0] + own[:, 1] - 128) * scale
        _same("row of a packed matrix", out, wanted.bfloat16())


def _drawn(draw: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=draw).bfloat16()


def _same(what: str, ours: torch.Tensor, torchs: torch.Tensor) -> None:
    # Two units in the last place, and as much beside results that nearly cancel.
    if not torch.allclose(ours.float(), torchs.float(), rtol=2**-6, atol=2**-7):
        raise UnsupportedModelError(f"what this machine's compiler made of them gives another {what} than torch")
