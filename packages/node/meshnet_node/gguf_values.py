"""The values of single GGUF tensors, de-quantised a few rows at a time.

Knows bytes and block types, not what they are for. Imports no torch.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from gguf import GGML_QUANT_SIZES, dequantize

from meshnet_core.errors import InvalidInputError

if TYPE_CHECKING:
    from pathlib import Path

    from meshnet_node.gguf_header import GgufTensor

    Array = np.ndarray[Any, np.dtype[Any]]

_BLOCK_BYTES = 8 << 20  # of fp32 values de-quantised at a time


class GgufValues:
    """One open GGUF file. What is not asked for is neither read nor mapped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def whole(self, tensor: GgufTensor) -> Array:
        """All values, fp32, of the tensor's shape."""
        values = np.empty(tensor.shape, np.float32)
        step = rows_at_a_time(tensor.shape)
        for start in range(0, tensor.shape[0], step):
            stop = min(start + step, tensor.shape[0])
            values[start:stop] = self.rows(tensor, start, stop)
        return values

    def rows(self, tensor: GgufTensor, start: int, stop: int) -> Array:
        """The values ``[start:stop]`` along the first dimension, fp32; all of a vector, whose blocks have no rows.

        Raises:
            InvalidInputError: the file has become shorter meanwhile.
        """
        shape = tensor.shape if len(tensor.shape) == 1 else (stop - start, *tensor.shape[1:])
        values = dequantize(self.blocks(tensor, start, stop), tensor.ggml_type)
        return np.asarray(values, np.float32).reshape(shape)

    def blocks(self, tensor: GgufTensor, start: int, stop: int) -> Array:
        """The bytes of the same rows as the file has them, uint8 ``[rows, bytes of a row]``; errors likewise."""
        row_bytes = tensor.nbytes // tensor.shape[0]
        if len(tensor.shape) == 1:
            start, stop, row_bytes = 0, 1, tensor.nbytes
        data = np.empty((stop - start) * row_bytes, np.uint8)
        self._file.seek(tensor.start + start * row_bytes)
        if self._file.readinto(data.data) != len(data):
            raise InvalidInputError(f"{self._path} ended inside {tensor.name}; was it replaced while being read?")
        block, block_bytes = GGML_QUANT_SIZES[tensor.ggml_type]
        return data.reshape(-1, tensor.shape[-1] // block * block_bytes)


def rows_at_a_time(shape: tuple[int, ...]) -> int:
    """How many rows make a block of work; every row of a vector."""
    return shape[0] if len(shape) == 1 else max(1, _BLOCK_BYTES // (4 * prod(shape[1:])))
