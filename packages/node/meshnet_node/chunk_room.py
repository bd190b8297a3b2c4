"""Memory that kernels for chunks work in, kept from call to call. Knows no kernels."""

from __future__ import annotations

import torch

_ALIGNED = 64


class ChunkRoom:
    """Not for two calls at once."""

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.float32)

    def at(self, values: int) -> int:
        """Address of so many float32, a multiple of 64 bytes; what was there before is lost."""
        spare = _ALIGNED // self._held.itemsize
        if self._held.numel() < values + spare:
            self._held = torch.empty(values + spare, dtype=torch.float32)  # whatever the process' default is now
        return -(-self._held.data_ptr() // _ALIGNED) * _ALIGNED
