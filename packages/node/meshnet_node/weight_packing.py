"""Packing a shard's weights while it is loaded: blocks from a GGUF straight into packed matrices.

A model that is about to be filled gives up the modules that will be packed (:meth:`Packing.take_out`), is filled with
the rest, and gets packed ones in their place (:meth:`Packing.put_in`), read a few rows at a time. So there is never
more than a packed shard, and a few MB of rows. Which modules may be packed is
:mod:`meshnet_node.packable_modules`' knowledge, what a product with them is :mod:`meshnet_node.packed_matrix`'s.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from meshnet_core.errors import InvalidInputError
from meshnet_node.checkpoint_reader import CheckpointReader, StoredTensor
from meshnet_node.gguf_blocks import BLOCK_BYTES, GROUP, HELD, PLANES, coded_rows
from meshnet_node.packable_modules import packable_modules
from meshnet_node.packed_matrix import PackedMatrix, packed_bytes
from meshnet_node.quantised_layers import QuantisedEmbedding, QuantisedLinear

_BLOCKS_NAME = re.compile(rf"(?P<weight>.+)\.(?P<kind>{'|'.join(BLOCK_BYTES)})")
_LAYER = re.compile(r"\blayers\.\d+\.")


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A weight stored as blocks of ``kind``: bytes ``[rows, bytes of a row]``."""

    kind: str
    stored: StoredTensor

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows as uint8 ``[stop - start, bytes of a row]``."""
        rows, row_bytes = self.stored.shape
        stop = min(stop, rows)
        part = replace(
            self.stored,
            offset=self.stored.offset + start * row_bytes,
            nbytes=(stop - start) * row_bytes,
            shape=(stop - start, row_bytes),
        )
        return part.read()


def stored_blocks(checkpoint: CheckpointReader) -> dict[str, StoredBlocks]:
    """What a folder holds as blocks, by the name of the weight."""
    found = {}
    for name, stored in checkpoint.tensors.items():
        if (match := _BLOCKS_NAME.fullmatch(name)) is not None and stored.dtype is torch.uint8:
            found[match["weight"]] = StoredBlocks(match["kind"], stored)
    return found


@dataclass(frozen=True, slots=True)
class _Packed:
    """One module that becomes packed: its weight's shape and where the blocks are."""

    module: str
    rows: int
    columns: int
    blocks: StoredBlocks

    @property
    def planes(self) -> int:
        return PLANES[self.blocks.kind]

    @property
    def nbytes(self) -> int:
        return packed_bytes(self.rows, self.columns, self.planes)


class Packing:
    """Which modules of a pruned model become packed.

    Args:
        model: pruned, on the meta device.
        checkpoint: of the folder that it will be filled from.

    Attributes:
        nbytes: bytes of the packed matrices.
        replaced_bytes: bytes that the same weights take in the model's dtype.
        stored_bytes: bytes to read.

    Raises:
        InvalidInputError: the folder holds blocks of a weight that the model cannot have packed, or of another shape.
    """

    def __init__(self, model: PreTrainedModel, checkpoint: CheckpointReader) -> None:
        modules = packable_modules(model)
        blocks = stored_blocks(checkpoint)
        self._packed = [
            _packed(name, module, found, checkpoint)
            for name, module in modules.items()
            if (found := blocks.get(f"{name}.weight")) is not None
        ]
        places = model.state_dict()
        names = {f"{packed.module}.weight" for packed in self._packed}
        if strange := sorted((blocks.keys() & places.keys()) - names):
            raise InvalidInputError(
                f"{checkpoint.folder} holds {strange[0]} as blocks, which this model cannot use packed"
            )
        table = next((name for name, module in modules.items() if isinstance(module, nn.Embedding)), None)
        tied = model.all_tied_weights_keys
        # The output projection that is the table of embeddings once more.
        self._tied = [name.removesuffix(".weight") for name in tied] if f"{table}.weight" in names else []
        self._table = table
        self.nbytes = sum(packed.nbytes for packed in self._packed)
        self.replaced_bytes = sum(places[name].nbytes for name in names)
        self.stored_bytes = sum(packed.blocks.stored.nbytes for packed in self._packed)
        self.held = _held((packed.module, packed.planes, packed.nbytes) for packed in self._packed)

    def take_out(self, model: PreTrainedModel) -> None:
        """Put placeholders where packed modules will be; they keep what else those have, a bias."""
        for name in (*(packed.module for packed in self._packed), *self._tied):
            model.set_submodule(name, _Placeholder(model.get_submodule(name)))
        if self._tied:
            model.all_tied_weights_keys = {}

    def put_in(self, model: PreTrainedModel, on_read: Callable[[int], None]) -> None:
        """Read the blocks and put packed modules where the placeholders are."""
        for packed in self._packed:
            matrix = _read(packed, on_read)
            model.set_submodule(
                packed.module, _module(matrix, model, packed.module, is_table=packed.module == self._table)
            )
            if packed.module == self._table:
                for name in self._tied:
                    model.set_submodule(name, _module(matrix, model, name, is_table=False))


class _Placeholder(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.bias = getattr(module, "bias", None)


def held_as(model: nn.Module) -> str:
    """How the layers of a loaded model hold most of what they hold packed: ``int4``, ``int8``, or nothing."""
    matrices = ((name, module) for name, module in model.named_modules() if isinstance(module, PackedMatrix))
    return _held((f"{name}.", matrix.planes, matrix.codes.nbytes) for name, matrix in matrices)


def _held(matrices: Iterable[tuple[str, int, int]]) -> str:
    nbytes: Counter[int] = Counter()
    for name, planes, size in matrices:
        if _LAYER.search(f"{name}.") is not None:
            nbytes[planes] += size
    return HELD[nbytes.most_common(1)[0][0]] if nbytes else ""


def _packed(name: str, module: nn.Linear | nn.Embedding, blocks: StoredBlocks, checkpoint: CheckpointReader) -> _Packed:
    weight = module.weight
    rows, columns = weight.shape
    expected = (rows, columns // GROUP * BLOCK_BYTES[blocks.kind])
    if blocks.stored.shape != expected:
        raise InvalidInputError(
            f"{checkpoint.folder}: {name}.weight has {list(blocks.stored.shape)} bytes of {blocks.kind} where a matrix "
            f"of {list(weight.shape)} has {list(expected)}"
        )
    return _Packed(name, rows, columns, blocks)


def _read(packed: _Packed, on_read: Callable[[int], None]) -> PackedMatrix:
    matrix = PackedMatrix(packed.rows, packed.columns, packed.planes)
    for start in range(0, packed.rows, matrix.rows_at_a_time):
        raw = packed.blocks.read(start, start + matrix.rows_at_a_time)
        matrix.fill(start, coded_rows(packed.blocks.kind, raw.numpy()))
        on_read(raw.nbytes)
    return matrix


def _module(matrix: PackedMatrix, model: PreTrainedModel, name: str, *, is_table: bool) -> nn.Module:
    if is_table:
        return QuantisedEmbedding(matrix)
    bias = model.get_submodule(name).bias
    return QuantisedLinear(matrix, bias.data if isinstance(bias, torch.Tensor) else None)
