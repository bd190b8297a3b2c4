"""The tensors of a checkpoint folder: where each one lies on disk, and how to read exactly one of them.

Reads the headers of every ``*.safetensors`` file of a folder rather than trust an index, so a folder may hold the
whole model, its shards, or only the files that one node fetched. A tensor is read with ``pread`` straight into its own
memory, so what is not asked for is neither read nor mapped. Knows nothing of models, layers or devices.

The format: https://huggingface.co/docs/safetensors (u64 header length, JSON header, raw little-endian data).
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from meshnet_core.errors import InvalidInputError, ModelNotFoundError

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor on disk: ``nbytes`` bytes at ``offset`` of ``path``."""

    name: str
    path: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """A fresh CPU tensor of the stored dtype and shape.

        Raises:
            InvalidInputError: if the file ends before the tensor does.
        """
        raw = torch.empty(self.nbytes, dtype=torch.uint8)
        view = raw.numpy().data
        with self.path.open("rb", buffering=0) as file:
            done = 0
            while done < self.nbytes:
                # One read moves at most 2 GiB on Linux; the loop goes on from there.
                count = os.preadv(file.fileno(), [view[done:]], self.offset + done)
                if count == 0:
                    raise InvalidInputError(f"{self.path} ends within tensor {self.name}; fetch the file again")
                done += count
        return raw.view(self.dtype).reshape(self.shape)


class LazyTensor:
    """A :class:`StoredTensor` in the guise that transformers' loader expects: ``[...]`` reads it.

    ``on_read`` is told the bytes read, from whichever thread read them.
    """

    def __init__(self, stored: StoredTensor, on_read: Callable[[int], None]) -> None:
        self._stored = stored
        self._on_read = on_read

    def __getitem__(self, index: object) -> torch.Tensor:
        if index is not Ellipsis:
            raise TypeError(f"a stored tensor is read whole, with [...], not with [{index!r}]")
        tensor = self._stored.read()
        self._on_read(self._stored.nbytes)
        return tensor


class CheckpointReader:
    """All tensors of a folder by name.

    Raises:
        ModelNotFoundError: if the folder holds no ``*.safetensors`` file.
        InvalidInputError: if a file is not safetensors, or two files hold the same name.
    """

    def __init__(self, folder: Path) -> None:
        if sys.byteorder != "little":
            raise InvalidInputError("checkpoints are little-endian and this machine is not")
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelNotFoundError(f"{folder} holds no *.safetensors file; other formats must be converted first")
        tensors: dict[str, StoredTensor] = {}
        for file in files:
            for stored in _read_header(file):
                if stored.name in tensors:
                    raise InvalidInputError(
                        f"tensor {stored.name} is in {tensors[stored.name].path.name} and in {file.name}; "
                        "keep the files of one checkpoint only"
                    )
                tensors[stored.name] = stored
        self.folder = folder
        self.tensors: Mapping[str, StoredTensor] = tensors

    def float_dtype(self) -> torch.dtype:
        """The floating dtype that most of the stored bytes have."""
        weight: Counter[torch.dtype] = Counter()
        for stored in self.tensors.values():
            if stored.dtype.is_floating_point:
                weight[stored.dtype] += stored.nbytes
        return weight.most_common(1)[0][0] if weight else torch.float32


def _read_header(path: Path) -> list[StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise InvalidInputError(f"{path} is not a safetensors file, or is cut short; fetch it again")
        try:
            header = json.loads(file.read(length))
            return [
                _stored(name, path, 8 + length, size, entry) for name, entry in header.items() if name != "__metadata__"
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInputError(f"{path} has a broken safetensors header: {error}") from error


def _stored(name: str, path: Path, data_start: int, file_size: int, entry: Mapping[str, object]) -> StoredTensor:
    dtype = _DTYPES.get(str(entry["dtype"]))
    if dtype is None:
        raise InvalidInputError(f"{path} stores {name} as {entry['dtype']}, which is not one of {', '.join(_DTYPES)}")
    shape_field, span = entry["shape"], entry["data_offsets"]
    if not isinstance(shape_field, list) or not isinstance(span, list):
        raise InvalidInputError(f"{path} has a broken safetensors header at {name}")
    shape = tuple(int(n) for n in shape_field)
    begin, end = int(span[0]), int(span[1])
    expected = dtype.itemsize
    for n in shape:
        expected *= n
    if begin < 0 or end - begin != expected or data_start + end > file_size:
        raise InvalidInputError(f"{path}: tensor {name} does not fit its header or its file; fetch the file again")
    return StoredTensor(name, path, data_start + begin, end - begin, dtype, shape)
