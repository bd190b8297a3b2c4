"""The tensors of a checkpoint folder: where each one lies on disk, and how to read exactly one of them.

Reads the headers of a folder's files rather than trust an index, so a folder may hold the whole model, its shards, or
only the files that one node fetched. A tensor is read with ``pread`` straight into its own
memory, so what is not asked for is neither read nor mapped. Knows nothing of models, layers or devices.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from meshnet_core.errors import InvalidInputError, ModelNotFoundError
from meshnet_node.tensor_index import TensorEntry, index_folder

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


_MAP_FROM = 1 << 16  # below this, rounding up to whole pages costs more than it saves


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
        raw = own_pages(self.nbytes)
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


def own_pages(nbytes: int) -> torch.Tensor:
    """A uint8 tensor of ``nbytes`` whose memory goes back to the system the moment it is freed.

    Experts are read one by one, fused and dropped, from several threads. The C allocator would keep what they leave
    behind, up to a layer for each thread; pages mapped for one tensor leave nothing.
    """
    if nbytes < _MAP_FROM:
        return torch.empty(nbytes, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


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
        ModelNotFoundError: if the folder holds no tensor in safetensors files.
        InvalidInputError: see :func:`meshnet_node.tensor_index.index_folder`; or a dtype that torch does not have.
    """

    def __init__(self, folder: Path) -> None:
        if sys.byteorder != "little":
            raise InvalidInputError("checkpoints are little-endian and this machine is not")
        self.folder = folder
        self.tensors: Mapping[str, StoredTensor] = {
            name: _stored(path, entry) for name, (path, entry) in index_folder(folder).items()
        }
        if not self.tensors:
            raise ModelNotFoundError(
                f"{folder} holds no tensors in *.safetensors; other formats must be converted first"
            )

    def float_dtype(self) -> torch.dtype:
        """The floating dtype that most of the stored bytes have."""
        weight: Counter[torch.dtype] = Counter()
        for stored in self.tensors.values():
            if stored.dtype.is_floating_point:
                weight[stored.dtype] += stored.nbytes
        return weight.most_common(1)[0][0] if weight else torch.float32


def _stored(path: Path, entry: TensorEntry) -> StoredTensor:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise InvalidInputError(f"{path} stores {entry.name} as {entry.dtype}; readable are {', '.join(_DTYPES)}")
    return StoredTensor(entry.name, path, entry.start, entry.nbytes, dtype, entry.shape)
