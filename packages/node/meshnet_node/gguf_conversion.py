"""A GGUF file as a folder of safetensors: de-quantised once, only the layers that are asked for, tensor by tensor.

The cache folder of one file and target dtype holds ``config.json``, ``embed.safetensors``, ``layer-00000.safetensors``
... and ``head.safetensors`` (final norm, and the output projection where it is not the embedding), each made when first
needed, so that overlapping shards and several processes on one machine share them. A file is written under another
name, synced and renamed: what has its final name is whole, also after a crash, and two processes may convert at once.

Knows how the cache is laid out; which tensor becomes which is :mod:`meshnet_node.gguf_tensor_map`'s knowledge.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any, Protocol

from meshnet_core.errors import InvalidInputError, UnsupportedModelError
from meshnet_node.atomic_file import folder_renamed_when_done, remove_stale, renamed_when_done
from meshnet_node.cache_folder import writing_to_cache
from meshnet_node.fingerprint import gguf_fingerprint
from meshnet_node.gguf_header import read_gguf_header
from meshnet_node.gguf_values import GgufValues
from meshnet_node.tensor_index import encode_header, read_header, tensor_bytes
from meshnet_node.text_files import read_text_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from meshnet_core.layer_range import LayerRange
    from meshnet_node.gguf_tensor_map import TensorPlan

# Part of the cache's path: raise it when the same GGUF would be converted differently.
CONVERSION_VERSION = 1
# Our word for a dtype, and the safetensors format's.
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class Progress(Protocol):
    """Called as work goes on: what is being done, units done, units in all (bytes here)."""

    def __call__(self, what: str, done: int, total: int, /) -> None: ...


class GgufConversion:
    """One GGUF file and its place in the cache.

    Attributes:
        fingerprint: of the file's contents, see :mod:`meshnet_node.fingerprint`.
        config: the model's config as transformers reads it from the file.

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

    def text_files(self) -> dict[str, bytes]:
        """Config, tokenizer and chat template as files, by name."""
        return read_text_files(self._text)

    def prepare(self, layers: LayerRange, *, dtype: str, progress: Progress | None = None) -> Path:
        """Make sure that the cache holds what these layers need, and say where.

        Args:
            layers: the range; its first layer brings the embeddings, its last the final norm and output projection.
            dtype: ``float32``, ``bfloat16`` or ``float16``.
            progress: told GGUF bytes done and in all; not called when nothing has to be done.

        Returns:
            A folder of ``config.json`` and safetensors files; it may hold other layers too.

        Raises:
            UnsupportedModelError: see :func:`meshnet_node.gguf_tensor_map.plan_tensors`; or values beyond float16.
            InvalidInputError: an unknown dtype, or a cache folder that cannot be written to or has no room.
        """
        check_dtype(dtype)
        folder = self.folder / dtype
        wanted = self._parts(layers)
        missing = [part for part in wanted if not self._is_whole(folder / f"{part}.safetensors", part, dtype)]
        if missing or not (folder / "config.json").is_file():
            with writing_to_cache():
                folder.mkdir(parents=True, exist_ok=True)
                remove_stale(folder)
                self._copy_config(folder, dtype)
                if missing:
                    self._convert(folder, missing, dtype, progress)
        return folder

    def _parts(self, layers: LayerRange) -> list[str]:
        last = layers.stop == self.config.get("num_hidden_layers", self.config.get("n_layer"))
        parts = [f"layer-{layer:05d}" for layer in range(layers.start, layers.stop)]
        if layers.start == 0 or (last and self.config.get("tie_word_embeddings")):
            parts.insert(0, "embed")
        return [*parts, "head"] if last else parts

    def _stamp(self, part: str, dtype: str) -> dict[str, str]:
        return {"format": "pt", "meshnet": f"{self.fingerprint} v{CONVERSION_VERSION} {part} {dtype}"}

    def _is_whole(self, path: Path, part: str, dtype: str) -> bool:
        """Whether the file is this part, of this model and conversion, and as long as its head says."""
        if not path.is_file():
            return False
        try:
            return read_header(path).metadata == self._stamp(part, dtype)
        except InvalidInputError:
            return False

    def _convert(self, folder: Path, parts: list[str], dtype: str, progress: Progress | None) -> None:
        from transformers import AutoConfig  # noqa: PLC0415  slow to import, only when something is converted

        from meshnet_node.gguf_tensor_map import plan_tensors  # noqa: PLC0415  imports torch

        config = AutoConfig.from_pretrained(self._text, local_files_only=True, trust_remote_code=False)
        plans = plan_tensors(self.header, config)
        _check_room(folder, sum(tensor_bytes(DTYPES[dtype], plan.shape) for part in parts for plan in plans[part]))
        total = sum(plan.source_bytes for part in parts for plan in plans[part])
        done = 0

        def count(source_bytes: int) -> None:
            nonlocal done
            done += source_bytes
            if progress is not None:
                progress(f"converting {self.path.name} ({dtype})", done, total)

        count(0)
        with GgufValues(self.path) as values:
            for part in parts:
                target = folder / f"{part}.safetensors"
                if self._is_whole(target, part, dtype):  # another process came this far meanwhile
                    count(sum(plan.source_bytes for plan in plans[part]))
                else:
                    _write_part(target, plans[part], values, dtype, self._stamp(part, dtype), count)

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


def _write_part(
    target: Path,
    plans: list[TensorPlan],
    source: GgufValues,
    dtype: str,
    stamp: dict[str, str],
    on_bytes: Callable[[int], None],
) -> None:
    import torch  # noqa: PLC0415  only when something is converted

    code, kind = DTYPES[dtype], getattr(torch, dtype)
    with renamed_when_done(target) as path, path.open("wb") as file:
        file.write(encode_header([(plan.name, code, plan.shape) for plan in plans], stamp))
        for plan in plans:
            end = file.tell() + tensor_bytes(code, plan.shape)
            for values in plan.values(source):
                # rounded by torch, as transformers does after de-quantising
                block = torch.from_numpy(values).to(kind).contiguous()
                if kind is torch.float16 and not bool(block.isfinite().all()):
                    raise UnsupportedModelError(f"{plan.name} has values beyond float16; use bfloat16 or float32")
                file.write(block.view(-1).view(torch.uint8).numpy().data)
            if file.tell() != end:
                raise UnsupportedModelError(f"{plan.name} came out {end - file.tell()} bytes short of {plan.shape}")
            on_bytes(plan.source_bytes)


def _check_room(folder: Path, needed: int) -> None:
    if (free := shutil.disk_usage(folder).free) < needed:
        raise InvalidInputError(
            f"converting needs {needed >> 20} MiB in {folder}, where {free >> 20} MiB are free; make room, or set "
            f"MESHNET_CACHE to a folder on a larger disk"
        )
