"""A GGUF file as a folder of safetensors: de-quantised once, or its blocks kept as they are and put in the order of
transformers' tensors; only the layers that are asked for, tensor by tensor.

The cache folder of one file and target dtype holds ``config.json``, ``embed.safetensors``, ``layer-00000.safetensors``
... and ``head.safetensors`` (final norm, and the output projection where it is not the embedding), each made when first
needed, so that overlapping shards and several processes on one machine share them. A file is written under another
name, synced and renamed: what has its final name is whole, also after a crash, and two processes may convert at once.

Knows how the cache is laid out; which tensor becomes which is :mod:`meshnet_node.gguf_tensor_map`'s knowledge.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from meshnet_core.errors import InvalidInputError, UnsupportedModelError
from meshnet_node.atomic_file import folder_renamed_when_done, remove_stale, renamed_when_done
from meshnet_node.cache_folder import writing_to_cache
from meshnet_node.fingerprint import gguf_fingerprint
from meshnet_node.gguf_blocks import HELD, PLANES
from meshnet_node.gguf_header import read_gguf_header
from meshnet_node.gguf_values import GgufValues
from meshnet_node.tensor_index import encode_header, read_header, tensor_bytes
from meshnet_node.text_files import read_text_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from meshnet_core.layer_range import LayerRange
    from meshnet_node.gguf_moves import BlockMoves
    from meshnet_node.gguf_tensor_map import TensorPlan

# Part of the cache's path: raise it when the same GGUF would be converted differently.
CONVERSION_VERSION = 1
# Our word for a dtype, and the safetensors format's.
_HELD = {kind: HELD[planes] for kind, planes in PLANES.items()}
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class Progress(Protocol):
    """Called as work goes on: what is being done, units done, units in all (bytes here)."""

    def __call__(self, what: str, done: int, total: int, /) -> None: ...


class GgufConversion:
    """One GGUF file and its place in the cache.

    Attributes:
        fingerprint: of the file's contents, see :mod:`meshnet_node.fingerprint`.
        config: the model's config as transformers reads it from the file.
        blocks: ``int4`` or ``int8`` where most of its layers' bytes can be held packed so, else empty.

    Raises:
        InvalidInputError: not a whole GGUF file, or a cache folder that cannot be written to.
        UnsupportedModelError: an architecture or a block type that cannot be read rightly, by name.
    """

    def __init__(self, path: Path, cache_dir: Path) -> None:
        self.path = path
        self.header = read_gguf_header(path)
        self.fingerprint = gguf_fingerprint(path, self.header.data_start)
        self.folder = cache_dir / "gguf" / f"{self.fingerprint[:32]}-v{CONVERSION_VERSION}"
        self._text = self.folder / "text"
        if not (self._text / "config.json").is_file():
            self._make_text_folder()
        self.config: dict[str, Any] = json.loads((self._text / "config.json").read_text("utf-8"))

    @property
    def blocks(self) -> str:
        nbytes: Counter[str] = Counter()
        for tensor in self.header.tensors.values():
            if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
                nbytes[_HELD.get(tensor.ggml_type.name, "")] += tensor.nbytes
        return nbytes.most_common(1)[0][0] if nbytes else ""

    def text_files(self) -> dict[str, bytes]:
        """Config, tokenizer and chat template as files, by name."""
        return read_text_files(self._text)

    def prepare(
        self, layers: LayerRange, *, dtype: str, packed: bool = False, progress: Progress | None = None
    ) -> Path:
        """Make sure that the cache holds what these layers need, and say where.

        Args:
            layers: the range; its first layer brings the embeddings, its last the final norm and output projection.
            dtype: ``float32``, ``bfloat16`` or ``float16``.
            packed: matrices of the types of :data:`~meshnet_node.gguf_blocks.BLOCK_BYTES` keep the file's blocks,
                under their name and ``.`` and the type, as bytes ``[rows, bytes of a row]``.
            progress: told GGUF bytes done and in all; not called when nothing has to be done.

        Returns:
            A folder of ``config.json`` and safetensors files; it may hold other layers too.

        Raises:
            UnsupportedModelError: see :func:`meshnet_node.gguf_tensor_map.plan_tensors`; or values beyond float16.
            InvalidInputError: an unknown dtype, or a cache folder that cannot be written to or has no room.
        """
        check_dtype(dtype)
        form = f"{dtype}-packed" if packed else dtype
        folder = self.folder / form
        wanted = self._parts(layers)
        missing = [part for part in wanted if not self._is_whole(folder / f"{part}.safetensors", part, form)]
        if missing or not (folder / "config.json").is_file():
            with writing_to_cache():
                folder.mkdir(parents=True, exist_ok=True)
                remove_stale(folder)
                self._copy_config(folder, dtype)
                if missing:
                    self._convert(folder, missing, dtype, form, progress)
        return folder

    def _parts(self, layers: LayerRange) -> list[str]:
        last = layers.stop == self.config.get("num_hidden_layers", self.config.get("n_layer"))
        parts = [f"layer-{layer:05d}" for layer in range(layers.start, layers.stop)]
        if layers.start == 0 or (last and self.config.get("tie_word_embeddings")):
            parts.insert(0, "embed")
        return [*parts, "head"] if last else parts

    def _stamp(self, part: str, form: str) -> dict[str, str]:
        return {"format": "pt", "meshnet": f"{self.fingerprint} v{CONVERSION_VERSION} {part} {form}"}

    def _is_whole(self, path: Path, part: str, form: str) -> bool:
        """Whether the file is this part, of this model and conversion, and as long as its head says."""
        if not path.is_file():
            return False
        try:
            return read_header(path).metadata == self._stamp(part, form)
        except InvalidInputError:
            return False

    def _convert(self, folder: Path, parts: list[str], dtype: str, form: str, progress: Progress | None) -> None:
        from transformers import AutoConfig  # noqa: PLC0415  slow to import, only when something is converted

        from meshnet_node.gguf_tensor_map import plan_tensors  # noqa: PLC0415  imports torch

        config = AutoConfig.from_pretrained(self._text, local_files_only=True, trust_remote_code=False)
        plans = plan_tensors(self.header, config)
        targets = {part: _targets(plans[part], dtype, packed=form != dtype) for part in parts}
        _check_room(folder, sum(target.nbytes for part in parts for target in targets[part]))
        total = sum(plan.source_bytes for part in parts for plan in plans[part])
        done = 0

        def count(source_bytes: int) -> None:
            nonlocal done
            done += source_bytes
            if progress is not None:
                progress(f"{'repacking' if form != dtype else 'converting'} {self.path.name} ({dtype})", done, total)

        count(0)
        with GgufValues(self.path) as values:
            for part in parts:
                path = folder / f"{part}.safetensors"
                if self._is_whole(path, part, form):  # another process came this far meanwhile
                    count(sum(plan.source_bytes for plan in plans[part]))
                else:
                    _write_part(path, targets[part], values, dtype, self._stamp(part, form), count)

    def _copy_config(self, folder: Path, dtype: str) -> None:
        for name in ("config.json", "generation_config.json"):
            document = json.loads((self._text / name).read_text("utf-8"))
            if name == "config.json":
                document["dtype"] = dtype
            with renamed_when_done(folder / name) as path:
                path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", "utf-8")

    def _make_text_folder(self) -> None:
        from meshnet_node.gguf_text import save_text_files  # noqa: PLC0415  torch and transformers, only when needed

        with writing_to_cache():
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_stale(self.folder)
            with folder_renamed_when_done(self._text) as folder:
                save_text_files(self.path, self.header, folder)


def check_dtype(dtype: str) -> None:
    """Raises:
    InvalidInputError: not one of :data:`DTYPES`.
    """
    if dtype not in DTYPES:
        raise InvalidInputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")


@dataclass(frozen=True, slots=True)
class _Target:
    """A tensor as it is written: values of ``code``, or blocks as bytes where ``moves`` says how they are laid."""

    plan: TensorPlan
    name: str
    code: str
    shape: tuple[int, ...]
    moves: BlockMoves | None

    @classmethod
    def of(cls, plan: TensorPlan, dtype: str, *, packed: bool) -> _Target:
        moves = plan.moves() if packed else None
        if moves is None:
            return cls(plan, plan.name, DTYPES[dtype], plan.shape, None)
        return cls(plan, f"{plan.name}.{moves.kind}", "U8", (*plan.shape[:-1], moves.row_bytes(plan.shape[-1])), moves)

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.code, self.shape)

    def pieces(self, source: GgufValues, dtype: str) -> Iterator[Any]:
        """Its bytes in order, as buffers."""
        import torch  # noqa: PLC0415  only when something is converted

        if self.moves is not None:
            for blocks in self.plan.blocks(source, self.moves):
                yield blocks.reshape(-1).data
            return
        kind = getattr(torch, dtype)
        for values in self.plan.values(source):
            # rounded by torch, as transformers does after de-quantising
            block = torch.from_numpy(values).to(kind).contiguous()
            if kind is torch.float16 and not bool(block.isfinite().all()):
                raise UnsupportedModelError(f"{self.name} has values beyond float16; use bfloat16 or float32")
            yield block.view(-1).view(torch.uint8).numpy().data


def _targets(plans: list[TensorPlan], dtype: str, *, packed: bool) -> list[_Target]:
    """How a part's tensors are written; a layer's experts all as blocks, or all de-quantised."""
    targets = [_Target.of(plan, dtype, packed=packed) for plan in plans]
    experts = [target for target in targets if ".experts." in target.plan.name]
    if all(target.moves is not None for target in experts):
        return targets
    return [_Target.of(t.plan, dtype, packed=packed and t not in experts) for t in targets]


def _write_part(
    path: Path,
    targets: list[_Target],
    source: GgufValues,
    dtype: str,
    stamp: dict[str, str],
    on_bytes: Callable[[int], None],
) -> None:
    with renamed_when_done(path) as partial, partial.open("wb") as file:
        file.write(encode_header([(target.name, target.code, target.shape) for target in targets], stamp))
        for target in targets:
            end = file.tell() + target.nbytes
            for piece in target.pieces(source, dtype):
                file.write(piece)
            if file.tell() != end:
                raise UnsupportedModelError(f"{target.name} came out {end - file.tell()} bytes short of {target.shape}")
            on_bytes(target.plan.source_bytes)


def _check_room(folder: Path, needed: int) -> None:
    if (free := shutil.disk_usage(folder).free) < needed:
        raise InvalidInputError(
            f"converting needs {needed >> 20} MiB in {folder}, where {free >> 20} MiB are free; make room, or set "
            f"MESHNET_CACHE to a folder on a larger disk"
        )
