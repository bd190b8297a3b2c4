"""Packing a shard's weights while it is loaded: blocks from a GGUF straight into packed matrices, wider ones rounded.

A model that is about to be filled gives up what comes as blocks (:meth:`Packing.take_out`). Of the rest, what is to be
rounded is packed as soon as its layer has been read (:meth:`Packing.round_loaded`); the blocks are read last, a few
rows at a time (:meth:`Packing.put_in`). So there is never more than a packed shard, and one layer or a few MB of rows.
Which weights may be packed is :mod:`meshnet_node.packable_modules`' knowledge, what a product with them is
:mod:`meshnet_node.packed_matrix`'s.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import nn
from transformers import PreTrainedModel

from meshnet_core.errors import InvalidInputError
from meshnet_node.checkpoint_reader import CheckpointReader, StoredTensor
from meshnet_node.device_memory import trim_heap
from meshnet_node.gguf_blocks import BLOCK_BYTES, GROUP, HELD, PLANES, CodedRows, coded_rows
from meshnet_node.packable_modules import Packable, Use, packable_weights, unpackable_experts
from meshnet_node.packed_experts import PackedExperts
from meshnet_node.packed_matrix import Packed, PackedMatrix, PackedStack, packed_bytes
from meshnet_node.quantised_layers import QuantisedEmbedding, QuantisedLinear
from meshnet_node.weight_rounding import rounded

_BLOCKS_NAME = re.compile(rf"(?P<weight>.+)\.(?P<kind>{'|'.join(BLOCK_BYTES)})")
_LAYER = re.compile(r"\blayers\.\d+\.")
_PLANES = {held: planes for planes, held in HELD.items()}


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A weight stored as blocks of ``kind``: bytes ``[..., rows, bytes of a row]``."""

    kind: str
    stored: StoredTensor

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows, of experts counted through all of them, as uint8 ``[stop - start, bytes of a row]``."""
        row_bytes = self.stored.shape[-1]
        offset, nbytes = self.stored.offset + start * row_bytes, (stop - start) * row_bytes
        return replace(self.stored, offset=offset, nbytes=nbytes, shape=(stop - start, row_bytes)).read()


def stored_blocks(checkpoint: CheckpointReader) -> dict[str, StoredBlocks]:
    """What a folder holds as blocks, by the name of the weight."""
    found = {}
    for name, stored in checkpoint.tensors.items():
        if (match := _BLOCKS_NAME.fullmatch(name)) is not None and stored.dtype is torch.uint8:
            found[match["weight"]] = StoredBlocks(match["kind"], stored)
    return found


@dataclass(frozen=True, slots=True)
class _Item:
    """One weight that becomes packed, from ``blocks`` or, where there are none, from what is loaded."""

    weight: Packable
    planes: int
    blocks: StoredBlocks | None

    @property
    def nbytes(self) -> int:
        *count, rows, columns = self.weight.shape
        return prod(count) * packed_bytes(rows, columns, self.planes)

    def fill(self, matrix: Packed, first: int, model: PreTrainedModel, on_read: Callable[[int], None]) -> None:
        """Fill a matrix with the rows from ``first`` on."""
        for start in range(0, matrix.rows, matrix.rows_at_a_time):
            stop = min(start + matrix.rows_at_a_time, matrix.rows)
            matrix.fill(start, self._coded(first + start, first + stop, model, on_read))

    def _coded(self, start: int, stop: int, model: PreTrainedModel, on_read: Callable[[int], None]) -> CodedRows:
        if self.blocks is None:
            values = model.get_parameter(self.weight.name).detach()
            return rounded(values.reshape(-1, values.shape[-1])[start:stop], self.planes)
        raw = self.blocks.read(start, stop)
        on_read(raw.nbytes)
        coded = coded_rows(self.blocks.kind, raw.numpy())
        kept = PLANES[self.blocks.kind]
        return coded if kept == self.planes else rounded(torch.from_numpy(coded.values(kept)), self.planes)


class Packing:
    """Which weights of a pruned model become packed.

    Args:
        model: pruned, on the meta device.
        checkpoint: of the folder that it will be filled from.
        quantize: ``int8`` or ``int4`` to round what is stored wider; else only what is stored as blocks is packed.

    Attributes:
        nbytes: bytes of the packed matrices.
        replaced_bytes: bytes that the same weights take in the model's dtype.
        stored_bytes: bytes of blocks to read.
        held: see :func:`held_as`.
        wide_experts: the first module of experts that cannot be packed, by name; None where there is none.

    Raises:
        InvalidInputError: the folder holds blocks of a weight that the model cannot have packed, or of another shape.
    """

    def __init__(self, model: PreTrainedModel, checkpoint: CheckpointReader, quantize: str = "auto") -> None:
        weights, blocks = packable_weights(model), stored_blocks(checkpoint)
        places, tied = model.state_dict(), set(model.all_tied_weights_keys)
        if strange := sorted((blocks.keys() & places.keys()) - weights.keys()):
            raise InvalidInputError(
                f"{checkpoint.folder} holds {strange[0]} as blocks, which this model cannot have packed"
            )
        items = []
        for weight in (weight for name, weight in weights.items() if name not in tied):
            found = blocks.get(weight.name)
            if found is not None:
                _check_shape(weight, found, checkpoint)
            if (planes := _planes(weight, found, quantize)) is not None:
                items.append(_Item(weight, planes, found))
        self._items = items
        self._table = next((item for item in items if item.weight.use is Use.TABLE), None)
        # Output projections that are the table of embeddings once more.
        self._tied = [name.removesuffix(".weight") for name in tied] if self._table is not None else []
        self.nbytes = sum(item.nbytes for item in items)
        self.replaced_bytes = sum(places[item.weight.name].nbytes for item in items)
        self.stored_bytes = sum(item.blocks.stored.nbytes for item in items if item.blocks is not None)
        self.wide_experts = unpackable_experts(model)
        self.held = _held((item.weight.module, item.planes, item.nbytes) for item in items)

    def take_out(self, model: PreTrainedModel) -> TakenOut:
        """Take the weights that come as blocks out of the model, and what is tied to them."""
        taken = TakenOut()
        for item in self._items:
            if item.blocks is not None:
                self._take(item, model, taken)
        for name in self._tied:
            model.set_submodule(name, nn.Identity())
        if self._tied:
            model.all_tied_weights_keys = {}
        return taken

    def round_loaded(self, model: PreTrainedModel, taken: TakenOut) -> None:
        """Pack what is to be rounded and was loaded by now, and take it out: finishing a model draws new buffers."""
        for item in self._items:
            if item.blocks is None and item.weight.module not in taken.modules:
                weight = model.get_submodule(item.weight.module)._parameters.get(item.weight.weight)
                if weight is not None and not weight.is_meta:
                    taken.rounded[item.weight.name] = _packed(item, model, lambda _nbytes: None)
                    self._take(item, model, taken)

    def put_in(self, model: PreTrainedModel, taken: TakenOut, on_read: Callable[[int], None]) -> None:
        """Put packed modules in place: of what was rounded, and of blocks, which are read now."""
        for name, items in self._by_module().items():
            weights = []
            for item in items:
                kept = taken.rounded.pop(item.weight.name, None)
                weights.append(_packed(item, model, on_read) if kept is None else kept)
            self._replace(model, taken.modules.pop(name), items[0], weights)
            trim_heap()  # of the rows that it came from, or the next one's find other places

    def _take(self, item: _Item, model: PreTrainedModel, taken: TakenOut) -> None:
        """Take one weight out, and with the last of a module the module."""
        name = item.weight.module
        module = model.get_submodule(name)
        module._parameters.pop(item.weight.weight)
        if not any(each.weight.weight in module._parameters for each in self._by_module()[name]):
            taken.modules[name] = module
            model.set_submodule(name, _Placeholder(module))

    def _by_module(self) -> dict[str, list[_Item]]:
        grouped: defaultdict[str, list[_Item]] = defaultdict(list)
        for item in self._items:
            grouped[item.weight.module].append(item)
        return grouped

    def _replace(
        self, model: PreTrainedModel, module: nn.Module, first: _Item, weights: list[PackedMatrix | PackedStack]
    ) -> None:
        name, matrix = first.weight.module, weights[0]
        if not isinstance(matrix, PackedMatrix):
            stacks = [stack for stack in weights if isinstance(stack, PackedStack)]
            model.set_submodule(name, PackedExperts(module, *stacks))
        elif first is self._table:
            model.set_submodule(name, QuantisedEmbedding(matrix))
            for head in self._tied:
                model.set_submodule(head, QuantisedLinear(matrix))
        else:
            bias = model.get_submodule(name).bias
            model.set_submodule(name, QuantisedLinear(matrix, bias.data if isinstance(bias, torch.Tensor) else None))


class TakenOut:
    """What is out of a model while it is filled.

    Attributes:
        modules: by name, those that placeholders stand for.
        rounded: by name, weights that were packed as they came.
    """

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.rounded: dict[str, PackedMatrix | PackedStack] = {}


class _Placeholder(nn.Module):
    """Keeps what else a module has to be loaded: a bias."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.bias = getattr(module, "bias", None)


def held_as(model: nn.Module) -> str:
    """How the layers of a loaded model hold most of what they hold packed: ``int4``, ``int8``, or nothing."""
    return _held((name, each.planes, each.codes.nbytes) for name, each in _matrices(model))


def _matrices(model: nn.Module) -> Iterator[tuple[str, PackedMatrix | PackedStack]]:
    for name, module in model.named_modules():
        if isinstance(module, (PackedMatrix, PackedStack)):
            yield name, module


def _held(matrices: Iterable[tuple[str, int, int]]) -> str:
    nbytes: Counter[int] = Counter()
    for name, planes, size in matrices:
        if _LAYER.search(f"{name}.") is not None:
            nbytes[planes] += size
    return HELD[nbytes.most_common(1)[0][0]] if nbytes else ""


def _planes(weight: Packable, blocks: StoredBlocks | None, quantize: str) -> int | None:
    """How many planes it is held in; None for as it is. What begins and ends the model stays in eight bits at least."""
    wanted = _PLANES.get(quantize)
    if wanted is not None and _LAYER.search(f"{weight.module}.") is None:
        wanted = 2
    if blocks is None or wanted is None:
        return wanted if blocks is None else PLANES[blocks.kind]
    return min(PLANES[blocks.kind], wanted)


def _check_shape(weight: Packable, blocks: StoredBlocks, checkpoint: CheckpointReader) -> None:
    expected = (*weight.shape[:-1], weight.shape[-1] // GROUP * BLOCK_BYTES[blocks.kind])
    if blocks.stored.shape != expected:
        raise InvalidInputError(
            f"{checkpoint.folder}: {weight.name} has {list(blocks.stored.shape)} bytes of {blocks.kind} where a weight "
            f"of {list(weight.shape)} has {list(expected)}"
        )


def _packed(item: _Item, model: PreTrainedModel, on_read: Callable[[int], None]) -> PackedMatrix | PackedStack:
    rows, columns = item.weight.shape[-2:]
    if item.weight.use is not Use.EXPERTS:
        matrix = PackedMatrix(rows, columns, item.planes)
        item.fill(matrix.held, 0, model, on_read)
        return matrix
    stack = PackedStack(item.weight.shape[0], rows, columns, item.planes)
    for index in range(stack.count):
        item.fill(stack[index], index * rows, model, on_read)
    return stack
