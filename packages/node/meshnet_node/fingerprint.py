"""The fingerprint of a model's contents: equal on two machines exactly when they may share a route.

A sha256 over the canonical config, the tensor index (names, dtypes, shapes) and, in place of every byte of the
weights, the size and sixteen sampled blocks of each file: cheap for 60 GB, and a different quantisation, fine-tune or
broken copy shows. It is no defence against someone who changes a weight between the samples. Knows nothing of paths:
moving or renaming changes nothing. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from meshnet_node.tensor_index import read_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

ROUNDING_VERSION = 1  # raise it when weights are rounded to others
SAMPLES, SAMPLE_BYTES = 16, 4096
# Written by the library that saved the config, not part of what the model computes.
_VOLATILE = frozenset({"_name_or_path", "name_or_path", "transformers_version"})


def folder_fingerprint(config: Mapping[str, Any], files: Iterable[Path]) -> str:
    """Fingerprint of a config and safetensors files, which are taken in the order of their names.

    Returns:
        64 hexadecimal digits.

    Raises:
        InvalidInputError: a file that is not a whole safetensors file.
    """
    digest = _Digest("safetensors", config)
    for path in sorted(files, key=lambda file: file.name):
        header = read_header(path)
        rows = sorted([entry.name, entry.dtype, list(entry.shape)] for entry in header.tensors.values())
        digest.add(json.dumps(rows).encode())
        for block in _samples(path, header.data_start):
            digest.add(block)
    return digest.hexdigest()


def gguf_fingerprint(path: Path, data_start: int) -> str:
    """Fingerprint of a GGUF file: its whole head (config, vocabulary, tensor table) and sampled blocks of the rest.

    Args:
        path: the file.
        data_start: bytes of its head, as :func:`meshnet_node.gguf_header.read_gguf_header` tells.
    """
    digest = _Digest("gguf", {})
    with path.open("rb") as file:
        digest.add(file.read(data_start))  # a few MB, most of it the vocabulary
    for block in _samples(path, data_start):
        digest.add(block)
    return digest.hexdigest()


def rounded_fingerprint(fingerprint: str, held: str) -> str:
    """Fingerprint of a model whose weights are rounded to ``held`` (``int8``, ``int4``): it answers otherwise."""
    digest = _Digest("rounded", {})
    digest.add(f"{fingerprint} {held} v{ROUNDING_VERSION}".encode())
    return digest.hexdigest()


def hub_fingerprint(config: Mapping[str, Any], files: Mapping[str, str]) -> str:
    """Fingerprint of a hub repository from its config and the hub's hash of each weight file, by file name.

    Needs no weight on this machine, so that a node with a few of the files agrees with one that has others.
    """
    digest = _Digest("hub", config)
    digest.add(json.dumps(sorted(files.items())).encode())
    return digest.hexdigest()


class _Digest:
    """A sha256 over parts, each behind its length, so that two ways to cut the same bytes into parts differ."""

    def __init__(self, kind: str, config: Mapping[str, Any]) -> None:
        self._sha = hashlib.sha256(f"meshnet fingerprint 1 {kind}\n".encode())
        kept = {key: value for key, value in config.items() if key not in _VOLATILE}
        self.add(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode())

    def add(self, part: bytes) -> None:
        self._sha.update(len(part).to_bytes(8, "little"))
        self._sha.update(part)

    def hexdigest(self) -> str:
        return self._sha.hexdigest()


def _samples(path: Path, start: int) -> Iterator[bytes]:
    """The size, then up to sixteen blocks spread evenly from ``start`` to the very end of the file."""
    size = path.stat().st_size
    yield str(size - start).encode()
    last = max(start, size - SAMPLE_BYTES)
    offsets = sorted({start + (last - start) * step // (SAMPLES - 1) for step in range(SAMPLES)})
    with path.open("rb", buffering=0) as file:
        for offset in offsets:
            file.seek(offset)
            yield file.read(SAMPLE_BYTES)
