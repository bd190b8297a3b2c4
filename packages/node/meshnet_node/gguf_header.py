"""The head of a GGUF file: metadata and the table of tensors, without a byte of tensor data.

A small reader of its own, because the ``gguf`` package's takes seconds over a vocabulary and transformers' does not
know every block type (Q5_0 among them). Knows the format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md),
not what a key or a tensor name means. Imports no torch.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from meshnet_core.errors import InvalidInputError

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
# Type ids of fixed-size metadata values: u8 i8 u16 i16 u32 i32 f32 bool u64 i64 f64.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 8  # ggml has four; more can only be garbage
_MAX_LISTED = 4096  # arrays of numbers above this length (scores, token types) are of no interest here


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies. ``shape`` is in torch order; ``start`` is an offset from the start of the file, bytes."""

    name: str
    ggml_type: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """``metadata`` holds scalars, strings and short number arrays; of a longer or a string array, its length."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data_start: int

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])


class _Cursor:
    """Bounds-checked reads over a buffer; every short read is one ``ValueError``."""

    def __init__(self, buffer: mmap.mmap | bytes) -> None:
        self.buffer = buffer
        self.at = 0

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.buffer):
            raise ValueError(f"the file ends inside its header, at byte {self.at}")
        data = self.buffer[self.at : self.at + count]
        self.at += count
        return data

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def string(self) -> str:
        (length,) = self.numbers("Q")
        return self.take(length).decode("utf-8")

    def skip_strings(self, count: int) -> None:
        """Walk over an array of strings: a vocabulary has 10**5 of them, so this is the one tight loop here."""
        unpack, at, size = struct.Struct("<Q").unpack_from, self.at, len(self.buffer)
        for _ in range(count):
            if at + 8 > size:
                raise ValueError(f"the file ends inside an array of strings, at byte {at}")
            at += 8 + unpack(self.buffer, at)[0]
        if at > size:
            raise ValueError(f"an array of strings runs {at - size} bytes past the end of the file")
        self.at = at

    def value(self) -> object:
        (kind,) = self.numbers("I")
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"metadata value of unknown type {kind}")
        element, count = *self.numbers("I"), *self.numbers("Q")
        if element == _STRING:
            self.skip_strings(count)
            return count
        if element not in _SCALARS:
            raise ValueError(f"metadata array of type {element}, which is neither numbers nor strings")
        if count > _MAX_LISTED:
            self.take(count * struct.calcsize(f"<{_SCALARS[element]}"))
            return count
        return list(self.numbers(_SCALARS[element], count))


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check the head of a GGUF file (version 2 or 3, little-endian).

    Raises:
        InvalidInputError: not GGUF, a version or block type this reader does not know, or a file that ends before
            its tensors do (a broken download).
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            return _parse(_Cursor(buffer), len(buffer))
    except (ValueError, OverflowError, MemoryError, struct.error) as error:  # mmap of an empty file is a ValueError
        raise InvalidInputError(f"{path} is not a usable GGUF file: {error}") from error


def _parse(cursor: _Cursor, size: int) -> GgufHeader:
    if cursor.take(4) != _MAGIC:
        raise ValueError("it does not start with the GGUF magic bytes")
    (version,) = cursor.numbers("I")
    if version not in _VERSIONS:
        raise ValueError(f"version {version} (a big-endian file shows as a huge one); versions 2 and 3 are read")
    tensor_count, value_count = cursor.numbers("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.string()
        metadata[key] = cursor.value()
    if not isinstance(metadata.get("general.architecture"), str):
        raise ValueError("its metadata names no general.architecture")  # noqa: TRY004  the file is wrong
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise ValueError(f"alignment {alignment!r} is not a power of two")
    table = [_tensor_row(cursor) for _ in range(tensor_count)]
    data_start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, kind, shape, offset in table:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            raise ValueError(f"tensor {name} of shape {shape} does not divide into {kind.name} blocks of {block}")
        start, nbytes = data_start + offset, prod(shape) // block * block_bytes
        if start + nbytes > size:
            raise ValueError(f"tensor {name} ends at byte {start + nbytes} of a file of {size}; a broken download?")
        if name in tensors:
            raise ValueError(f"tensor {name} is there twice")
        tensors[name] = GgufTensor(name, kind, shape, start, nbytes)
    return GgufHeader(metadata, tensors, data_start)


def _tensor_row(cursor: _Cursor) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
    name = cursor.string()
    (dims,) = cursor.numbers("I")
    if dims > _MAX_DIMS:
        raise ValueError(f"tensor {name} claims {dims} dimensions")
    shape = tuple(reversed(cursor.numbers("Q", dims)))  # ggml writes the fastest-moving dimension first
    (kind,) = cursor.numbers("I")
    (offset,) = cursor.numbers("Q")
    try:
        return name, GGMLQuantizationType(kind), shape, offset
    except ValueError:
        raise ValueError(f"tensor {name} is of unknown ggml type {kind}") from None
