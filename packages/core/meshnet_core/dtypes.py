"""Names and widths of the dtypes that shards compute in and hidden states travel in. Knows no tensor library.

A shard's dtype is what it computes in, and behind a ``+`` how its layers' weights are held where that is narrower:
``bfloat16+int4``. Hidden states travel in the part before it.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshnet_core.errors import InvalidInputError

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
TOKEN_ID_BYTES = 4  # int32, little-endian
PACKED_WEIGHT_BYTES: dict[str, float] = {"int8": 1.125, "int4": 0.625}
"""Bytes of one weight with its share of scales and zeros (four bytes for 32 weights), by how it is held."""


def computed_in(dtype: str) -> str:
    """``bfloat16+int4`` -> ``bfloat16``."""
    return dtype.partition("+")[0]


def weight_width(dtype: str) -> float:
    """Bytes that one weight of a layer takes.

    Raises:
        InvalidInputError: as :func:`dtype_bytes`.
    """
    held = dtype.partition("+")[2]
    return PACKED_WEIGHT_BYTES[held] if dtype_bytes(dtype) and held else float(dtype_bytes(dtype))


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of what a shard computes with, and of hidden states.

    Raises:
        InvalidInputError: if ``dtype`` is not one that travels.
    """
    kind, plus, held = dtype.partition("+")
    if kind not in DTYPE_BYTES or (plus and held not in PACKED_WEIGHT_BYTES):
        known = ", ".join(DTYPE_BYTES)
        packed = " or ".join(f"+{name}" for name in PACKED_WEIGHT_BYTES)
        raise InvalidInputError(
            f"unknown dtype {dtype!r}; hidden states travel as one of {known}, and {packed} may follow for weights"
        )
    return DTYPE_BYTES[kind]


def wire_dtype(hop_dtypes: Iterable[str]) -> str:
    """The dtype for a route: the one all hops compute in, float32 where they differ (it holds both 16-bit kinds)."""
    names = set(hop_dtypes)
    for name in names:
        dtype_bytes(name)
    kinds = {computed_in(name) for name in names}
    return kinds.pop() if len(kinds) == 1 else "float32"
