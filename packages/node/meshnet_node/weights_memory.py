"""Whether weights fit into the memory that is free, and what is said where they do not. Knows no shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshnet_core.errors import CacheFullError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable


class WeightsMemory:
    """Memory for weights.

    Args:
        free_bytes: what weights may take now; not looked at if None.
    """

    def __init__(self, free_bytes: Callable[[], int] | None) -> None:
        self._free_bytes = free_bytes

    def short(self, needs: int) -> int | None:
        """The bytes that are free, where ``needs`` are more; None where they fit."""
        if self._free_bytes is None or needs <= (free := self._free_bytes()):
            return None
        return free


def size(nbytes: int) -> str:
    """For people."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def taken(what: object, needs: int, free: int) -> CacheFullError:
    """For now: what takes the memory is used by sessions."""
    return CacheFullError(
        f"no memory for {what}: it needs {size(needs)}, {size(free)} is free, and the shards that are loaded are in use"
    )


def too_large(needs: int, free: int, remedy: str) -> InvalidInputError:
    """For good."""
    return InvalidInputError(
        f"the weights to be loaded take {size(needs)}, and {size(free)} of memory is free. {remedy}"
    )
