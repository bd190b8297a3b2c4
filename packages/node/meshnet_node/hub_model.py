"""A model on the Hugging Face hub: its files' hashes for the fingerprint, and the download of what a shard needs.

Files land in the hub client's own cache (``HF_HOME``), which other tools share. What the hub says of a repository is
kept in our cache folder, so that a node whose files are here starts without a network. Runs no code of a repository and
knows of a tensor only what its name tells: which layer it belongs to.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from meshnet_core.errors import ModelNotFoundError, UnsupportedModelError
from meshnet_core.text_file_names import TEXT_FILE_NAMES
from meshnet_node.atomic_file import renamed_when_done
from meshnet_node.cache_folder import writing_to_cache
from meshnet_node.fingerprint import hub_fingerprint
from meshnet_node.hub_download import HubFile, check_room, fetch
from meshnet_node.tensor_index import INDEX_NAME, read_weight_map
from meshnet_node.text_files import read_text_files

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

    from meshnet_core.layer_range import LayerRange
    from meshnet_node.gguf_conversion import Progress

_TIMEOUT_S = 10.0
_PIECE = re.compile(r"model-\d+-of-\d+\.safetensors")
_LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|embed_in|word_embeddings|wte|embeddings)\.weight$")
_HEAD = re.compile(
    r"(?:^|\.)(?:lm_head|embed_out|output|norm|norm_f|ln_f|final_norm|final_layernorm|embedding_norm)\.(?:weight|bias)$"
)
# Parts of a repository that a text model does not run: image and audio towers, drafting heads.
_UNUSED = re.compile(r"(?:^|\.)(?:visual|vision_tower|vision_model|audio_tower|mtp)\.")


@dataclass(frozen=True)
class _Listing:
    """One revision of a repository.

    Attributes:
        commit: names the revision.
        texts: the small files it has, of those that are used here.
        weights: the hub's hash of each weight file, by name.
        sizes: bytes of each, as far as the hub tells; empty in what an older version of meshnet has kept.
    """

    commit: str
    texts: list[str]
    weights: dict[str, str]
    sizes: dict[str, int] = field(default_factory=dict)


class HubModel:
    """One repository, its config fetched.

    Attributes:
        fingerprint: of the config and the hub's file hashes, so it needs no weights here.
        config: the parsed ``config.json``.

    Raises:
        ModelNotFoundError: no such repository, no access to it, or no network and nothing of it here.
        UnsupportedModelError: a repository without safetensors.
        InvalidInputError: a cache folder that cannot be written to.
    """

    def __init__(self, hub_id: str, cache_dir: Path) -> None:
        self.hub_id = hub_id
        self._listing, self._reachable = _listed(hub_id, cache_dir / "hub" / f"{hub_id.replace('/', '--')}.json")
        self._folder = self._fetch(self._listing.texts)
        self.config: dict[str, Any] = json.loads((self._folder / "config.json").read_text("utf-8"))
        self.fingerprint = hub_fingerprint(self.config, self._listing.weights)

    def text_files(self) -> dict[str, bytes]:
        """Config, tokenizer and chat template, by name."""
        return read_text_files(self._folder)

    def prepare(
        self, layers: LayerRange, *, dtype: str, packed: bool = False, progress: Progress | None = None
    ) -> Path:
        """Fetch the weight files that hold tensors of these layers, and say where they are.

        A download that was interrupted goes on where it broke off. ``progress`` is told bytes, of all files together.
        """
        del dtype, packed  # safetensors stay as they are
        names = self._files_for(layers)
        missing = [self._file(name) for name in names if not self._is_here(name)]
        if missing and not self._reachable:
            raise self._unreachable([file.name for file in missing])
        check_room(missing)
        total, done = sum(file.size or 0 for file in missing), 0
        for file in missing:

            def tell(nbytes: int, file: HubFile = file, before: int = done) -> None:
                if progress is not None:
                    progress(f"fetching {file.name} of {self.hub_id}", before + nbytes, max(total, before + nbytes))

            fetch(file, tell)
            done += file.size or 0
        return self._fetch(names)

    def _file(self, name: str) -> HubFile:
        listing = self._listing
        return HubFile(self.hub_id, listing.commit, name, listing.weights[name], listing.sizes.get(name))

    def _is_here(self, name: str) -> bool:
        """Whether the hub client has it; one that it only misses the link to is linked by `_fetch`."""
        found = try_to_load_from_cache(self.hub_id, name, revision=self._listing.commit)
        return isinstance(found, str) and Path(found).is_file()

    def _unreachable(self, names: list[str]) -> ModelNotFoundError:
        return ModelNotFoundError(f"{', '.join(names)} of {self.hub_id} is not here, and the hub cannot be reached")

    def _files_for(self, layers: LayerRange) -> list[str]:
        if INDEX_NAME not in self._listing.texts:
            return sorted(self._listing.weights)
        text = self.config.get("text_config") or self.config
        last = layers.stop == text.get("num_hidden_layers", layers.stop)
        tied = bool(text.get("tie_word_embeddings", self.config.get("tie_word_embeddings", True)))
        weights = read_weight_map(self._folder)
        return sorted({file for name, file in weights.items() if _is_needed(name, layers, last=last, tied=tied)})

    def _fetch(self, names: list[str]) -> Path:
        """The snapshot's folder, once it holds these files; asks the network only for what is not there."""
        where: dict[str, Any] = {"revision": self._listing.commit, "allow_patterns": names}
        with suppress(LocalEntryNotFoundError):
            folder = Path(str(snapshot_download(self.hub_id, local_files_only=True, **where)))
            if all((folder / name).is_file() for name in names):
                return folder
        if not self._reachable:  # the client would try for half a minute more
            raise self._unreachable(names)
        try:
            return Path(str(snapshot_download(self.hub_id, **where)))
        except Exception as error:  # the hub client raises whatever its HTTP library does
            raise ModelNotFoundError(f"cannot fetch {self.hub_id} from the hub: {error}") from error


def _is_needed(name: str, layers: LayerRange, *, last: bool, tied: bool) -> bool:
    """Whether a shard may need a tensor; what a name does not tell is fetched.

    Args:
        name: of the tensor.
        layers: the shard's.
        last: whether they include the model's last layer.
        tied: whether the output projection is the embedding matrix.
    """
    if _UNUSED.search(name):
        return False
    if (match := _LAYER.search(name)) is not None:
        return int(match[1]) in layers
    if _EMBEDDING.search(name):
        return layers.start == 0 or (last and tied)
    return last if _HEAD.search(name) else True


def _listed(hub_id: str, saved: Path) -> tuple[_Listing, bool]:
    """What the hub says of the repository's newest revision; with no hub to ask, what it said last time.

    Returns:
        The listing, and whether the hub answered.
    """
    try:
        info = HfApi().model_info(hub_id, files_metadata=True, timeout=_TIMEOUT_S)
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{hub_id} needs its owner's permission; ask for it on the hub's page and log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"no such folder here and no public model on the hub: {hub_id}; check the name, or `hf auth login`"
        ) from error
    except Exception as error:  # no network: whatever the hub client's HTTP library raises
        if saved.is_file():
            return _Listing(**json.loads(saved.read_text("utf-8"))), False
        raise ModelNotFoundError(
            f"no such folder here, and the hub cannot be reached for {hub_id} ({error}); give a folder or a .gguf file"
        ) from error
    listing = _read_listing(hub_id, info)
    with writing_to_cache():
        saved.parent.mkdir(parents=True, exist_ok=True)
        with renamed_when_done(saved) as path:
            path.write_text(json.dumps(asdict(listing), indent=2, sort_keys=True) + "\n", "utf-8")
    return listing, True


def _read_listing(hub_id: str, info: ModelInfo) -> _Listing:
    files = {file.rfilename: file for file in info.siblings or []}
    weights = {name: file for name, file in files.items() if name.endswith(".safetensors") and "/" not in name}
    # some repositories carry a second copy of the weights in another layout beside these
    if INDEX_NAME in files:
        weights = {name: file for name, file in weights.items() if _PIECE.fullmatch(name)} or weights
    elif "model.safetensors" in weights:
        weights = {"model.safetensors": weights["model.safetensors"]}
    if not weights or "config.json" not in files:
        gguf = any(name.endswith(".gguf") for name in files)
        raise UnsupportedModelError(
            f"{hub_id} has no config.json with .safetensors beside it"
            + ("; download one of its .gguf files and give its path" if gguf else "")
        )
    texts = [name for name in (*TEXT_FILE_NAMES, INDEX_NAME) if name in files]
    hashes = {name: file.lfs.sha256 if file.lfs is not None else str(file.blob_id) for name, file in weights.items()}
    return _Listing(str(info.sha), texts, hashes, {name: file.size for name, file in weights.items() if file.size})
