"""Safetensors headers: which tensor lies in which file, of what dtype and shape, at which bytes.

The codec of the format's head (https://github.com/huggingface/safetensors#format) and the index of a folder. Reads
headers only, never a tensor; knows no layers and no model. Imports no torch.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

from meshnet_core.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

INDEX_NAME = "model.safetensors.index.json"
# The format's own limit.
MAX_HEADER_BYTES = 100_000_000
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32,
    "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: ``dtype`` in the format's words (``BF16``), bytes ``[start, stop)`` of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """``tensors`` in the order of their bytes; ``data_start`` is where the first one's begin."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_start: int


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor.

    Raises:
        ValueError: an unknown dtype, or a number of bits that does not fill whole bytes.
    """
    if dtype not in _BITS:
        raise ValueError(f"unknown dtype {dtype!r}")
    bits = prod(shape) * _BITS[dtype]
    if bits % 8:
        raise ValueError(f"{dtype} of shape {tuple(shape)} does not fill whole bytes")
    return bits // 8


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The head of a file that holds ``(name, dtype, shape)`` in this order, padded to a multiple of eight bytes."""
    document: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, dtype, shape in tensors:
        stop = at + tensor_bytes(dtype, shape)
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def decode_header(head: bytes, file_size: int) -> SafetensorsHeader:
    """Read and check a head: known dtypes, and tensors that fill the rest of the file without a gap or an overlap.

    Args:
        head: the file's first bytes, at least eight and the header's length.
        file_size: bytes of the whole file; a file cut short or grown is refused.

    Raises:
        ValueError: anything that is not so, in words.
    """
    if len(head) < 8 or file_size < 8:
        raise ValueError(f"{min(len(head), file_size)} bytes are too few for a header")
    (length,) = struct.unpack_from("<Q", head)
    if length > MAX_HEADER_BYTES or 8 + length > min(len(head), file_size):
        raise ValueError(f"the header claims {length} bytes of a file of {file_size}")
    try:
        document = json.loads(head[8 : 8 + length].decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the header is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError("the header is not a JSON object")  # noqa: TRY004  the file is wrong, not a caller's type
    metadata = document.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("the header's __metadata__ does not map names to strings")
    data_start = 8 + length
    entries = sorted((_entry(name, row, data_start) for name, row in document.items()), key=lambda e: (e.start, e.stop))
    at = data_start
    for entry in entries:
        if entry.start != at:
            raise ValueError(f"tensor {entry.name} starts at byte {entry.start} where {at} was due")
        at = entry.stop
    if at != file_size:
        raise ValueError(f"the header describes {at} bytes, the file has {file_size}")
    return SafetensorsHeader({entry.name: entry for entry in entries}, metadata, data_start)


def _entry(name: str, row: object, data_start: int) -> TensorEntry:
    if not isinstance(row, dict):
        raise ValueError(f"tensor {name!r} is described by {row!r}")  # noqa: TRY004
    dtype, shape, offsets = row.get("dtype"), row.get("shape"), row.get("data_offsets")
    if not isinstance(dtype, str) or not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} lacks a dtype, a shape or two data_offsets")
    if offsets[1] - offsets[0] != (expected := tensor_bytes(dtype, shape)):
        raise ValueError(f"tensor {name!r} has {offsets[1] - offsets[0]} bytes where {dtype} {shape} takes {expected}")
    return TensorEntry(name, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _is_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def read_header(path: Path) -> SafetensorsHeader:
    """The checked head of one file.

    Raises:
        InvalidInputError: not a safetensors file, or one cut short.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if len(head) == 8:
            head += file.read(min(struct.unpack("<Q", head)[0], MAX_HEADER_BYTES, size))
    try:
        return decode_header(head, size)
    except ValueError as error:
        raise InvalidInputError(f"{path} is not a whole safetensors file: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model of ``folder``, sorted by name; those that its index names but the
    folder lacks are left out (a node needs only its own).

    Without an index, ``model.safetensors`` alone where there is one (some folders carry a second copy in another
    layout beside it), else every ``*.safetensors``.

    Raises:
        InvalidInputError: an index that is not one, or that points outside the folder.
    """
    if (folder / INDEX_NAME).is_file():
        return [folder / name for name in sorted(set(read_weight_map(folder).values())) if (folder / name).is_file()]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    return sorted(folder.glob("*.safetensors"))


def read_weight_map(folder: Path) -> dict[str, str]:
    """Tensor name to file name, from the folder's ``model.safetensors.index.json``.

    Raises:
        InvalidInputError: not such a document, or a file name that is not a plain name.
    """
    path = folder / INDEX_NAME
    try:
        document = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path} is not JSON: {error}") from error
    weights = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
        raise InvalidInputError(f"{path} has no weight_map of tensor names to file names")
    for file in weights.values():
        if "/" in file or "\\" in file or not file.endswith(".safetensors"):
            raise InvalidInputError(f"{path} names {file!r}; only .safetensors files beside it are read")
    return weights


def index_folder(folder: Path) -> dict[str, tuple[Path, TensorEntry]]:
    """Every tensor of the folder's weight files: name to file and entry.

    Raises:
        InvalidInputError: a broken file, or one name in two files.
    """
    found: dict[str, tuple[Path, TensorEntry]] = {}
    for path in weight_files(folder):
        for entry in read_header(path).tensors.values():
            if entry.name in found:
                raise InvalidInputError(f"tensor {entry.name} is in {found[entry.name][0].name} and in {path.name}")
            found[entry.name] = (path, entry)
    return found
