"""Names and widths of the dtypes that hidden states travel in. Knows no tensor library."""

from __future__ import annotations

from collections.abc import Iterable

from meshnet_core.errors import InvalidInputError

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
TOKEN_ID_BYTES = 4  # int32, little-endian


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element.

    Raises:
        InvalidInputError: if ``dtype`` is not one that travels.
    """
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        known = ", ".join(DTYPE_BYTES)
        raise InvalidInputError(f"unknown dtype {dtype!r}; hidden states travel as one of {known}") from None


def wire_dtype(hop_dtypes: Iterable[str]) -> str:
    """The dtype for a route: the one all hops compute in, float32 where they differ (it holds both 16-bit kinds)."""
    kinds = set(hop_dtypes)
    for kind in kinds:
        dtype_bytes(kind)
    return kinds.pop() if len(kinds) == 1 else "float32"
