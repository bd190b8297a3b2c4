"""What ``--device auto`` and ``--dtype auto`` pick. Pure but for looking at the machine; knows no models."""

from __future__ import annotations

from collections.abc import Callable

import torch

from meshnet_core.errors import InvalidInputError

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The names that options and the wire use."""


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def choose_device(requested: str = "auto") -> torch.device:
    """The device to run on: CUDA before MPS before the CPU, or what was asked for.

    Raises:
        InvalidInputError: if the device asked for is unknown or not there.
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if requested == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        raise InvalidInputError(f"device {requested!r} is unknown; write auto, cpu, cuda, cuda:N or mps") from error
    present = {
        "cpu": True,
        "cuda": cuda and (device.index or 0) < torch.cuda.device_count(),
        "mps": mps,
    }
    if not present.get(device.type, False):
        here = ", ".join(name for name, there in (("cpu", True), ("cuda", cuda), ("mps", mps)) if there)
        raise InvalidInputError(f"device {requested!r} is not on this machine; it has {here}")
    return device


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 natively (AVX512-BF16 or AMX); without that float32 is faster."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def cuda_has_bfloat16() -> bool:
    """Whether the GPU multiplies bfloat16 natively (Ampere and later), not emulated."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def choose_dtype(
    requested: str,
    device: torch.device,
    stored: torch.dtype,
    *,
    cpu_bfloat16: Callable[[], bool] = cpu_has_bfloat16,
    cuda_bfloat16: Callable[[], bool] = cuda_has_bfloat16,
) -> torch.dtype:
    """The dtype to hold weights and compute in. ``stored`` is what the checkpoint holds.

    ========  ==================  =====================================================================
    device    stored in 16 bits   why
    ========  ==================  =====================================================================
    cpu       bfloat16, if the    half the memory to read for each token; where the CPU has no
              CPU has it natively instructions for it, it is emulated and slower than float32
    cuda      bfloat16, if the    bfloat16 checkpoints overflow in float16, so that is only the fallback
              GPU has it          of GPUs that lack it; a float16 checkpoint stays float16
    mps       float16             Apple's matrix kernels are fastest and most complete in it
    ========  ==================  =====================================================================

    A checkpoint stored in float32 is held in float32 on the CPU, and in what 16-bit ones get on a GPU or MPS, where
    memory is the limit. Ask for a dtype by name to have it otherwise, or to make two unlike nodes agree.

    Raises:
        InvalidInputError: if ``requested`` is neither auto nor one of :data:`DTYPES`.
    """
    if requested != "auto":
        if requested not in DTYPES:
            raise InvalidInputError(f"dtype {requested!r} is unknown; write auto, {', '.join(DTYPES)}")
        return DTYPES[requested]
    if device.type == "mps":
        return torch.float16
    if device.type == "cuda":
        return torch.bfloat16 if cuda_bfloat16() and stored is not torch.float16 else torch.float16
    return torch.bfloat16 if stored.itemsize <= 2 and cpu_bfloat16() else torch.float32
